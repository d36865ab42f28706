"""A few cases of each target of `make fuzz`, and what it must notice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audit import Guard
from tests.fuzz import TARGETS, fuzz


@pytest.fixture(scope="module")
def guard() -> Guard:
    """Made at its first use: a hook stays in the process, and is called for each file that is opened."""
    return Guard()


@pytest.mark.parametrize(
    "name", ["config", "data", "checkpoint", "calls", pytest.param("http", marks=pytest.mark.slow)]
)
def test_a_few_cases(name, guard):
    cases = {"config": 10, "data": 10, "checkpoint": 10, "calls": 30, "http": 40}[name]
    assert sum(fuzz(name, cases, first_seed=1, guard=guard).values()) >= cases


@pytest.mark.parametrize(
    "act",
    [
        lambda folder: (folder.parent / "outside").write_text("x"),
        lambda folder: (folder / "link").symlink_to("x") or (folder / "link").rename(folder.parent / "link"),
        lambda folder: os.system("true"),
        lambda folder: subprocess.run([sys.executable, "-c", ""]),
    ],
)
def test_the_guard_notices(act, guard, tmp_path):
    (tmp_path / "case").mkdir()
    with pytest.raises(AssertionError, match="outside of the folder"), guard.watching(tmp_path / "case"):
        act(tmp_path / "case")


def test_the_guard_allows_the_folder(guard, tmp_path):
    with guard.watching(tmp_path):
        (tmp_path / "a").write_text("x")
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "b").unlink()
        Path(__file__).read_text()


def test_the_shares_add_up():
    assert sum(target.share for target in TARGETS.values()) == pytest.approx(1)
