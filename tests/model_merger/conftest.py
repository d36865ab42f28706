"""Checkpoints of every layout, made once."""

import shutil
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """The folder that `layouts.py` fills; not to be changed."""
    root = tmp_path_factory.mktemp("checkpoints")
    done = run_python(str(Path(__file__).with_name("layouts.py")), str(root), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.fixture
def copied(made, tmp_path):
    """name of a layout -> a copy of its folder that a test may damage."""
    return lambda name: Path(shutil.copytree(made / name, tmp_path / "copy"))
