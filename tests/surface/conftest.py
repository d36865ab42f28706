"""What a user has before the first run: a tiny model, rows in files, and settings; and the command lines in-process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.conftest import make_tiny, run_settings
from verl.trainer.main_ppo import main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with model/, train.jsonl, test.jsonl and reward.py."""
    return make_tiny(tmp_path_factory.mktemp("surface"))


@pytest.fixture
def settings(tiny, tmp_path) -> list[str]:
    """Overrides of a small run with GRPO; it goes to tmp_path / "run"."""
    return [*run_settings(tiny, tmp_path / "run"), "algorithm.adv_estimator=grpo"]


@pytest.fixture
def steps(tmp_path) -> Callable[..., list[dict[str, float]]]:
    """Train by a command line that must succeed; the metrics of each step, as the run wrote them down."""

    def run(*arguments: str) -> list[dict[str, float]]:
        assert main(list(arguments)) == 0
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


@pytest.fixture
def refused(tmp_path, capsys) -> Callable[..., str]:
    """(a folder like `tiny`, overrides) -> what stands on stderr: one error, and no folder of a run."""

    def run(tiny: Path, *overrides: str) -> str:
        settings = [*run_settings(tiny, tmp_path / "run"), "algorithm.adv_estimator=grpo"]
        assert main([*settings, "trainer.total_training_steps=1", *overrides]) == 1
        shown = capsys.readouterr().err
        assert shown.startswith("error: ") and shown.count("error: ") == 1 and "Traceback" not in shown
        assert not (tmp_path / "run").exists()
        return shown

    return run
