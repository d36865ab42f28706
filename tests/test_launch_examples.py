"""examples/launch, constraints/ and .github/: the files are valid, and the settings of their commands are read."""

import ast
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from verl.trainer import main_ppo

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "examples" / "launch"
RECIPE = "examples/recipes/qwen2_5_7b_math/config.yaml"
COMMAND = re.compile(r"(?:verl train|verl\.trainer\.main_ppo) (--config .*)")


def commands(path: Path) -> list[list[str]]:
    """The arguments of the commands that train, with the values of variables."""
    text = path.read_text().replace("\\\n", "")
    values = {"$CONFIG": RECIPE, "{CONFIG}": RECIPE, "/shared/run.yaml": RECIPE, "$GPUS": "8", "{GPUS}": "8"}
    values |= {"${NNODES:-1}": "1", "$@": ""}
    found = []
    for line in COMMAND.findall(text):
        for name, value in values.items():
            line = line.replace(name, value)
        found.append([word for word in shlex.split(line.rstrip('"')) if word])
    return found


@pytest.mark.parametrize(
    "path", [path for path in sorted(LAUNCH.iterdir()) if path.suffix != ".md"], ids=lambda p: p.name
)
def test_the_command_of_a_launcher_is_read(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    if path.suffix == ".yaml":
        assert isinstance(yaml.safe_load(text), dict)
    elif path.suffix == ".py":
        ast.parse(text)
    else:
        subprocess.run(["bash", "-n", path], check=True)
    for arguments in (found := commands(path)):
        assert main_ppo.main([*arguments, "--print-config"]) == 0
        config = yaml.safe_load(capsys.readouterr().out)["trainer"]
        assert (config["n_gpus_per_node"], config["nnodes"]) == (8, 2 if "trainer.nnodes=2" in arguments else 1)
    assert len(found) == 1 and f"[{path.name}]({path.name})" in (LAUNCH / "README.md").read_text()


def test_the_constraints_name_versions_of_all_dependencies():
    ranges = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in ranges}
    for name in ("cpu", "cuda"):
        lines = [line for line in (ROOT / f"constraints/{name}.txt").read_text().splitlines() if line[0] != "#"]
        assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lines)  # no local version, no index
        pinned = dict(line.replace("-", "_").split("==") for line in lines)
        assert name == "cuda" or pinned.keys() >= needed
    assert pinned["vllm"] in (ROOT / "verl/rollout/vllm/traits.py").read_text()


def test_the_workflow_runs_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {run.split()[1] for run in runs} == {"test", "test-all", "lint", "docs", "dist"}
    assert all(f"\n{run.split()[1]}:" in makefile for run in runs)
    for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir():
        form = yaml.safe_load(path.read_text())
        assert form["name"] and all(item["attributes"]["label"] for item in form["body"])
