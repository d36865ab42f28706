"""Benchmarks and scripts that cannot do their work say so, and end with status 1."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd, stdin=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("grpo_step.py", ["--suite=cpu", "--steps=3", "--set=trainer.no_such_key=1"]),
        ("showcase.py", ["no/such/model", "--steps=3"]),
    ],
)
def test_a_run_that_fails(script, arguments):
    done = run(sys.executable, f"benchmarks/{script}", *arguments, "--against=", "--threads=1")
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("ours: 0 of 3 steps; its process ended with status 1 (see its output above)\n")


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments"), [("grpo_step.py", ["--suite=cpu"]), ("showcase.py", ["model"])])
def test_no_step_to_measure(script, arguments):
    done = run(sys.executable, f"benchmarks/{script}", *arguments, "--steps=1", "--against=")
    assert done.returncode != 0 and "--steps=1: expected " in done.stderr


def test_the_set_up_refuses_a_linked_environment(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup_venv.sh", tmp_path / "scripts")
    (tmp_path / "other").mkdir()
    os.symlink(tmp_path / "other", tmp_path / ".venv")
    done = run("bash", "scripts/setup_venv.sh", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f".venv is a link to {tmp_path / 'other'}: remove it (rm .venv), or activate that environment and do not run "
        "this script\n"
    )
    assert list((tmp_path / "other").iterdir()) == []
