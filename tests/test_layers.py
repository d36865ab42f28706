"""Imports point down only: read from the source of every file, imports inside functions included."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = {
    # traits say what an engine can do, to those that may not import it
    0: [
        *("verl.utils", "verl.processes", "verl.checkpoints", "verl.tracking", "verl.env_check", "verl.compat"),
        *("verl.rollout.traits", "verl.engines.traits"),
    ],
    1: ["verl.protocol", "verl.batch", "verl.columns", "verl.registry", "verl.config"],
    2: ["verl.algorithms", "verl.dataflow", "verl.modeling"],
    # below the engines, which they know by contract: requests and completions, and what receives weights
    2.5: [
        "verl.weight_sync",
        "verl.agents",
        "verl.rollout.request",
        "verl.rollout.routed_experts",
    ],
    3: ["verl.engines", "verl.rollout", "verl.single_controller", "verl.data", "verl.rewards"],
    3.5: ["verl.server"],
    # the planner predicts what engines and rollout do, so it reads their constants and measures them
    4: ["verl.workers", "verl.planner"],
    5: ["verl.__main__", "verl.cli", "verl.trainer", "verl.evaluation", "verl.model_merger"],
    6: ["verl.recipe", "recipe", "examples", "benchmarks"],
}
LAYER = {part: layer for layer, parts in LAYERS.items() for part in parts}

#: layers whose parts do not know each other
BLIND = {2, 3}

#: parts that may not use all that lies below: maths knows tensors, and the names under which it is found
ONLY = {
    "verl.algorithms": {"verl.registry"},
    "verl.dataflow": {"verl.protocol", "verl.columns", "verl.registry"},
    "verl.modeling": {"verl.registry"},
}

#: package -> the files and folders that may import it; those AT_USE inside functions only
ADAPTERS = {"ray": {"verl/single_controller/ray/"}, "vllm": {"verl/rollout/vllm/"}, "sglang": {"verl/rollout/sglang/"}}
ADAPTERS |= {"megatron": {"verl/engines/megatron/"}}
AT_USE = {"vllm", "sglang"}  # the engine's factory imports the modules of megatron, which subclass its models, at use

HANDED_ON = {"__all__", "__version__", "_HOME"}
#: the one call in an __init__ file
LAZY = "__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)"
LAZY_NAMES = "verl.utils.lazy.lazy_names"


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """The entry of the layer table that a module belongs to; None outside the project."""
    return next((part for part in LAYER if module == part or module.startswith(part + ".")), None)


@functools.cache
def imports(path: Path, text: str) -> list[tuple[int, str, bool]]:
    """(line, imported module or name with its module in front, is it at module level) of every import of a file."""
    return list(_imports(path, text))  # without the tree: half a million objects would slow the collector


def _imports(path: Path, text: str) -> Iterator[tuple[int, str, bool]]:
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    lines = text.split("\n")
    for statement in ast.parse(text).body:
        if not any("import" in line for line in lines[statement.lineno - 1 : statement.end_lineno]):
            continue
        top = not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name, top) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                module = ".".join(part for part in (base, node.module) if part)
                yield from ((node.lineno, f"{module}.{alias.name}", top) for alias in node.names)
            elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")):
                yield from ((node.lineno, arg.value, top) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def called(node: ast.Call) -> str:
    """The last name of what is called: "c" of `a.b.c()`. Nothing for what has no name, such as `f()()`."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer in ONLY:
        return imported in ONLY[importer]
    if LAYER[importer] == LAYER[imported]:
        return LAYER[importer] not in BLIND
    return LAYER[imported] < LAYER[importer]


def upward(path: Path, text: str) -> list[str]:
    importer = part_of(module_of(path))
    found = []
    for line, name, _ in imports(path, text):
        imported = part_of(name)
        lazy = path.name == "__init__.py" and name == LAZY_NAMES
        if imported is not None and not lazy and not may_import(importer, imported):
            found.append(f"{path.relative_to(ROOT)}:{line}: {importer} must not import {name}")
    return found


def strays(path: Path, text: str) -> list[str]:
    """Imports of an optional package outside its adapter, or when the adapter is merely loaded."""
    where = path.relative_to(ROOT).as_posix()
    found = []
    for line, name, top in imports(path, text):
        package = name.split(".")[0]
        if package in ADAPTERS and (not where.startswith(tuple(ADAPTERS[package])) or (top and package in AT_USE)):
            found.append(f"{where}:{line}: {package} is imported {'at module level' if top else 'here'}")
    return found


def test_every_module_is_in_the_table():
    assert {p for p in map(module_of, sources("verl")) if part_of(p) is None} == {"verl"}


def test_imports_point_down():
    files = [path for path in sources("verl", "examples", "benchmarks") if module_of(path) != "verl"]
    assert [fault for path in files for fault in upward(path, path.read_text())] == []


def test_optional_packages_stay_in_their_adapters():
    files = sources("verl")
    assert [fault for path in files for fault in strays(path, path.read_text())] == []


def test_mathematics_knows_no_processes():
    found = [
        f"{path.name}:{line}: {name}"
        for path in sources("verl/algorithms")
        for line, name, _ in imports(path, path.read_text())
        if name.startswith(("torch.distributed", "transformers", "tensordict"))
    ]
    assert found == []


def test_private_names_stay_at_home():
    found = []
    for path in sources("verl", "examples", "benchmarks"):
        for line, name, _ in imports(path, path.read_text()):
            module, _, last = name.rpartition(".")
            if part_of(module) and last.startswith("_") and not last.startswith("__"):
                found.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert found == []


def only_hands_names_on(text: str) -> list[str]:
    """What an __init__ file holds beside imports, __all__, and a table of names that __getattr__ loads at first use."""
    found = []
    for i, node in enumerate(ast.parse(text).body):
        docstring = i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = {ast.unparse(target) for target in node.targets} if isinstance(node, ast.Assign) else {""}
        function = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        function = function or ast.unparse(node) == LAZY
        if not (docstring or function or names <= HANDED_ON or isinstance(node, ast.Import | ast.ImportFrom)):
            found.append(ast.unparse(node).splitlines()[0])
    return found


def test_init_files_only_hand_names_on():
    files = [path for path in sources("verl") if path.name == "__init__.py"]
    found = {module_of(path): only_hands_names_on(path.read_text()) for path in files}
    assert {module: faults for module, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("verl/utils/x.py", "from verl.registry import Registry", True),
        ("verl/utils/x.py", "def f():\n    import verl.trainer", True),
        ("verl/engines/x.py", "from verl.rollout.base import Engine", True),
        ("verl/engines/x.py", "from verl import rollout", True),
        ("verl/engines/x.py", "from ..rollout import base", True),
        ("verl/engines/x.py", "from . import base", False),
        ("verl/engines/x.py", "import importlib\nimportlib.import_module('verl.workers')", True),
        ("verl/engines/x.py", "from verl.algorithms.masked import masked_mean", False),
        ("verl/algorithms/x.py", "from verl.protocol import DataProto", True),
        ("verl/dataflow/flow.py", "from verl.algorithms import kl", True),
        ("verl/trainer/x.py", "from verl.workers.critic import CriticWorker", False),
        ("verl/workers/x.py", "from verl.trainer import base", True),
        ("verl/rollout/hf/engine.py", "def f():\n    import vllm", True),
        ("verl/rollout/vllm/engine.py", "import vllm", True),
        ("verl/rollout/vllm/engine.py", "class A:\n    def f(self):\n        from vllm import LLM", False),
        ("verl/workers/x.py", "from ray.util import placement_group", True),
        ("verl/single_controller/ray/cluster.py", "import ray", False),
        ("verl/trainer/ray_trainer.py", "import ray", True),
    ],
)
def test_the_rules_themselves(file, line, fault):
    path = ROOT / file
    assert bool(upward(path, line) + strays(path, line)) == fault


def test_the_rule_of_init_files_itself():
    assert (
        only_hands_names_on('"""Doc."""\nfrom a import b\n__all__ = ["b"]\n_HOME = {}\ndef __getattr__(name): ...')
        == []
    )
    assert only_hands_names_on("_HOME = {}\n__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)") == []
    assert only_hands_names_on("__getattr__, __dir__ = other(__name__)") == ["__getattr__, __dir__ = other(__name__)"]
    assert only_hands_names_on("x = 1") == ["x = 1"]
    assert only_hands_names_on("def f():\n    pass") == ["def f():"]
