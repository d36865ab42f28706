"""Figures about the source tree: sizes, import cycles and chains, banned words, and what a step and a start enter.

    python scripts/house.py                       # this repository, as a table
    python scripts/house.py FOLDER --json         # another checkout, such as a git worktree of an older commit
    python scripts/house.py --no-trace            # without the traced runs (about 40 s)

The traced figures come from subprocesses that train a tiny model by GRPO with the code of FOLDER.
"""

import argparse
import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.glossary import banned_identifiers, banned_prose

PACKAGES = ("verl",)
GROUPS = (*PACKAGES, "recipe", "benchmarks", "examples", "scripts", "tests")
ENTRY = "verl.trainer.main_ppo"


# ---- sizes ----------------------------------------------------------------------------------------------------------


def files_of(root: Path, *folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def spread(values: Iterable[int]) -> dict[str, int]:
    """Median, 95th percentile and maximum."""
    ordered = sorted(values) or [0]
    return {
        "median": ordered[len(ordered) // 2],
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max": ordered[-1],
    }


def sizes(root: Path, folder: str) -> dict[str, Any]:
    """Files, lines and functions of a folder, without those that it links to, such as verl/recipe."""
    texts = [path.read_text(encoding="utf-8") for path in files_of(root, folder)]
    functions = [
        node.end_lineno - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = [len(text.splitlines()) for text in texts]
    return {
        "files": len(texts),
        "lines": sum(lines),
        "functions": len(functions),
        "file lines": spread(lines),
        "function lines": spread(functions),
    }


# ---- imports --------------------------------------------------------------------------------------------------------


def module_of(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def import_graph(root: Path, inside_functions: bool = True) -> dict[str, set[str]]:
    """Module -> the modules of the project that it imports; imports for type checking do not count."""
    paths = {module_of(root, path): path for path in files_of(root, *PACKAGES)}
    return {module: _imported(module, path, paths, inside_functions) - {module} for module, path in paths.items()}


def _imported(module: str, path: Path, paths: dict[str, Path], inside_functions: bool) -> set[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in _import_nodes(ast.parse(path.read_text(encoding="utf-8")), inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in paths}
            continue
        above = package.rsplit(".", node.level - 1)[0] if node.level else ""
        base = ".".join(name for name in (above, node.module) if name)
        for alias in node.names:
            name = f"{base}.{alias.name}"
            found |= {name} if name in paths else {base} & paths.keys()
    return found


def _import_nodes(node: ast.AST, inside_functions: bool) -> Iterable[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # half of all nodes
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif inside_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _import_nodes(child, inside_functions)


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components (Tarjan 1972), each after those that it imports."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def longest_chain(graph: dict[str, set[str]], start: str) -> list[str]:
    """The longest chain of imports from a module; a cycle counts as one module."""
    groups = components(graph)
    group_of = {module: i for i, group in enumerate(groups) for module in group}
    chains: list[list[str]] = []
    for i, group in enumerate(groups):
        after = {group_of[other] for module in group for other in graph[module]} - {i}
        chains.append([group[0], *max((chains[j] for j in after), key=len, default=[])])
    return chains[group_of[start]]


# ---- traced steps and starts ----------------------------------------------------------------------------------------

# The traced programs use only names that older commits have too: examples/quickstart, Pipeline, LocalPPOTrainer.
_TASK = """
import functools, json, os, sys
from pathlib import Path
root, work = Path(sys.argv[1]), Path(sys.argv[2])
from examples.quickstart.tasks import write_task
from examples.quickstart.tiny_model import tiny_model

model, data = tiny_model("llama", work / "model"), write_task("reverse", work / "data", rows=16)
settings = [
    "algorithm.name=grpo", f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'test.parquet'}",
    "data.train_batch_size=8", "data.max_prompt_length=16", "data.max_response_length=8",
    f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.name=native",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.old_log_prob_pass=always",
    f"reward.custom_reward_function.path={root / 'examples/quickstart/tasks.py'}",
    "trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.test_freq=-1",
    "trainer.save_at_end=false", "trainer.device=cpu", f"trainer.default_local_dir={work / 'run'}",
    "trainer.logger=[jsonl]",
]
inside = f"{root}/verl/"

def is_function(code):
    # as `sizes` counts them: no modules, lambdas and comprehensions, which have frames only before Python 3.12
    return code.co_filename.startswith(inside) and not code.co_name.startswith("<")

def name_of(code):
    return code.co_filename.removeprefix(f"{root}/")

def frames_below(frame, name):
    \"\"\"Functions of the project on the stack, from the one of this name to the frame.\"\"\"
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(inside):
            found.insert(0, frame.f_code)
            if frame.f_code.co_qualname == name:
                return found
        frame = frame.f_back
    return []
"""

# The second of three GRPO steps: from the end of the first to the end of the second.
_STEP = """
from verl.dataflow.operator import running_operator
from verl.trainer.local_trainer import LocalPPOTrainer

entered, loop, to_loss = {}, [], []
stack = []  # the operators that are running

def profile(frame, event, arg):
    code = frame.f_code
    if event == "return" and stack and stack[-1][1] is frame:
        stack.pop()
    if event == "call" and code in operator_codes and not stack:
        stack.append((running_operator(), frame))
    if event != "call" or not is_function(code):
        return
    entered.setdefault(stack[-1][0] if stack else None, set()).add((name_of(code), code.co_qualname))
    if code.co_qualname == "Pipeline.run" and not loop:
        loop.extend(frames_below(frame, "Trainer.fit"))
    if code.co_name == "vanilla" and code.co_filename.endswith("algorithms/policy_losses.py") and not to_loss:
        to_loss.extend(frames_below(frame, "Pipeline.run"))

def code_of(func):
    while isinstance(func, functools.partial):
        func = func.func
    func = func if hasattr(func, "__code__") or hasattr(func, "__func__") else type(func).__call__
    return func.__code__

def on_step(report):
    if report.step == 1:
        entered.clear()
    else:
        sys.setprofile(None)

trainer = LocalPPOTrainer(overrides=settings)
operator_codes = {code_of(op.func) for op in trainer.pipeline.operators}
trainer.on_step.append(on_step)
sys.setprofile(profile)
trainer.fit()

every = set().union(*entered.values())
starts = [i for i, code in enumerate(to_loss) if code in operator_codes]
path = [name_of(code) for code in to_loss[starts[0]:]]
visited = [name for i, name in enumerate(path) if i == 0 or name != path[i - 1]]

def counts(functions):
    return {"functions": len(functions), "files": len({file for file, _ in functions})}

print("\\n" + json.dumps({
    "one GRPO step": counts(every),
    "of it beside the operators": counts(entered[None]),
    "operators": {name: counts(functions) for name, functions in entered.items() if name},
    "frames from fit to Pipeline.run": len(loop),
    "loop": [f"{name_of(code)}:{code.co_name}" for code in loop],
    "files from update_actor to the loss": len(set(visited)),
    "returns to a file on that way": len(visited) - len(set(visited)),
}))
"""

# `verl train`, from the import of the command to the first operator, in the main thread.
_START = """
functions = set()

def profile(frame, event, arg):
    code = frame.f_code
    if event != "call" or not is_function(code):
        return
    if code.co_qualname == "Pipeline.run":
        sys.setprofile(None)
        files = {file for file, _ in functions}
        print("\\n" + json.dumps({"start": {"functions": len(functions), "files": len(files)}}), flush=True)
        os._exit(0)
    functions.add((name_of(code), code.co_qualname))

for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
    del sys.modules[name]
sys.argv = ["verl", "train", *settings]
sys.setprofile(profile)
from verl.cli.app import app
app()
"""


def traced(root: Path, program: str) -> dict[str, Any]:
    """Run a traced program with the code of a checkout, and return the JSON object that it prints last."""
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(
            [sys.executable, "-c", _TASK + program, str(root), work],
            cwd=work,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            encoding="utf-8",
        )
    if done.returncode != 0:
        raise SystemExit(f"the traced run of {root} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- single importers -----------------------------------------------------------------------------------------------


_FOUND_BY_NAME = ("__init__.py", "traits.py")


def small_modules(root: Path, lines: int = 60) -> list[str]:
    """Modules of at most so many lines with exactly one importer. The packages' own files do not count, nor those that
    are found by their name: `traits.py` of an engine."""
    graph = import_graph(root)
    importers = {module: [other for other, imported in graph.items() if module in imported] for module in graph}
    paths = {module_of(root, path): path for path in files_of(root, *PACKAGES) if path.name not in _FOUND_BY_NAME}
    return sorted(
        module
        for module, path in paths.items()
        if len(importers[module]) == 1 and len(path.read_text(encoding="utf-8").splitlines()) <= lines
    )


# ---- all of it ------------------------------------------------------------------------------------------------------


def banned_words(root: Path) -> dict[str, int]:
    """Findings in identifiers and prose of the packages; the table of old module paths does not count."""
    searches = {"identifiers": banned_identifiers, "prose": banned_prose}
    return {
        kind: sum(found[0] != "verl/compat.py" for package in PACKAGES for found in search(root, package))
        for kind, search in searches.items()
    }


def figures(root: Path, with_traces: bool = True) -> dict[str, Any]:
    """All figures of a checkout."""
    at_import, everywhere = import_graph(root, inside_functions=False), import_graph(root)
    chain = longest_chain(everywhere, ENTRY)
    return {
        "sizes": {folder: sizes(root, folder) for folder in GROUPS if (root / folder).is_dir()},
        "import cycles": [sorted(group) for group in components(everywhere) if len(group) > 1],
        "import cycles at module level": [sorted(group) for group in components(at_import) if len(group) > 1],
        f"longest import chain from {ENTRY}": {"links": len(chain) - 1, "modules": chain},
        "banned words": banned_words(root),
        "modules of at most 60 lines with one importer": small_modules(root),
        "traced": traced(root, _STEP) | traced(root, _START) if with_traces else {},
    }


def print_table(found: dict[str, Any]) -> None:
    print(f"{'':12}{'files':>8}{'lines':>9}{'functions':>11}   {'file med/p95/max':>18}   {'function med/p95/max':>20}")
    for folder, row in found["sizes"].items():
        files, functions = ("/".join(map(str, row[kind].values())) for kind in ("file lines", "function lines"))
        print(f"{folder:12}{row['files']:>8}{row['lines']:>9,}{row['functions']:>11,}   {files:>18}   {functions:>20}")
    for name in ("import cycles", "import cycles at module level"):
        print(f"\n{name}: {len(found[name])}")
        for group in found[name]:
            print("  " + " <-> ".join(group))
    chain = found[f"longest import chain from {ENTRY}"]
    print(f"\nlongest import chain from {ENTRY}: {chain['links']} links\n  " + " > ".join(chain["modules"]))
    words = found["banned words"]
    print(f"\nbanned words: {words['identifiers']} in identifiers, {words['prose']} in prose")
    small = found["modules of at most 60 lines with one importer"]
    print(f"modules of at most 60 lines with one importer: {len(small)}\n  " + " ".join(small))
    for name, value in found["traced"].items():
        print(f"{name}: {_format_traced(value)}")


def _format_traced(value: Any) -> str:
    if isinstance(value, list):
        return " > ".join(value)
    if not isinstance(value, dict):
        return str(value)
    if "functions" in value:
        return f"{value['functions']:,} functions in {value['files']} files"
    return "".join(f"\n  {name}: {_format_traced(counts)}" for name, counts in value.items())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parents[1], help="a checkout")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--no-trace", action="store_true", help="skip the traced training steps")
    args = parser.parse_args(arguments)
    found = figures(args.folder.resolve(), with_traces=not args.no_trace)
    print(json.dumps(found, indent=1)) if args.json else print_table(found)


if __name__ == "__main__":
    main()
