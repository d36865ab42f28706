"""The name of a plug-in stands in its own folder: everybody else asks its traits, or its signature.

A literal "vllm" elsewhere is a table that the next engine must be added to by hand.
"""

import ast
import re
from pathlib import Path

import pytest

from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from verl.engines.traits import built_in_strategies
from verl.rollout.traits import built_in_engines

ROOT = Path(__file__).parents[1]

#: tables of public verl's keys and paths, and what selects an algorithm
TABLES = ("verl/config/public/", "verl/compat/")
PRESETS = ("verl/config/presets.py", "verl/recipe/")

HOMES = {
    **{name: (f"verl/rollout/{name}/", *TABLES) for name in built_in_engines()},
    **{name: (f"verl/engines/{name}/", *TABLES) for name, traits in built_in_strategies().items() if traits.package},
    **{name: ("verl/algorithms/", *PRESETS, *TABLES) for name in ADV_ESTIMATOR_REGISTRY},
}
"""Name -> the folders and files in which it may be a string."""

#: file -> (names, why)
EXCEPTIONS = {
    "verl/config/schema/algorithm.py": ({"gae"}, "a default"),
    "verl/config/schema/rollout.py": ({"native"}, "a default"),
    "verl/planner/workload.py": ({"native"}, "a default"),
    "verl/cli/serve.py": ({"native"}, "a default"),
    "verl/rollout/checks.py": ({"hf"}, "what an error suggests instead of an engine that does not support a model"),
    "verl/rollout/traits.py": ({"native"}, "what an error suggests instead of an engine that is not installed"),
    "verl/model_merger/__main__.py": ({"megatron"}, "a value of public verl's option --backend"),
    "verl/rewards/managers.py": ({"prime"}, "a reward manager of the same name"),
}


#: only a file with one of them is parsed
QUOTED = re.compile(rf"[\"']({'|'.join(map(re.escape, HOMES))})[\"']")


def literals(text: str) -> set[str]:
    """The string constants of a file."""
    if not QUOTED.search(text):
        return set()
    return {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and node.value in HOMES}


def strays(path: str, text: str) -> set[str]:
    """Names of plug-ins that a file may not have."""
    allowed = EXCEPTIONS.get(path, (set(), ""))[0]
    return {name for name in literals(text) - allowed if not path.startswith(HOMES[name])}


def test_names_stand_in_their_own_folders():
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "verl").rglob("*.py")}
    assert {path: names for path, text in files.items() if (names := strays(path, text))} == {}


@pytest.mark.parametrize("path", EXCEPTIONS)
def test_exceptions_are_needed(path):
    names, reason = EXCEPTIONS[path]
    assert reason and names <= literals((ROOT / path).read_text())


@pytest.mark.parametrize(
    ("path", "text", "names"),
    [
        ("verl/planner/x.py", 'if job.engine in ("vllm", "sglang"): ...', {"vllm", "sglang"}),
        ("verl/planner/x.py", '"""The engine vllm."""', set()),
        ("verl/rollout/vllm/x.py", 'name = "vllm"; other = "sglang"', {"sglang"}),
        ("verl/config/checks/x.py", '{"remax": 1}', {"remax"}),
        ("verl/recipe/x.py", '"remax"', set()),
        ("verl/config/public/x.py", '"remax", "vllm", "megatron"', set()),
    ],
)
def test_the_rule_itself(path, text, names):
    assert strays(path, text) == names
