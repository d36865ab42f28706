"""`trainer.val_only`: a validation of a checkpoint leaves the record of the training run as it was."""

import json
import logging
from pathlib import Path

import pytest

from tests.trainer.runs import lines
from verl.tracking.runs import run_folders
from verl.trainer.output.run_log import record_folder
from verl.trainer.ppo_trainer import PPOTrainer

RECORD = ("run.json", "metrics.jsonl", "samples.jsonl", "steps.jsonl", "warnings.jsonl")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RECORD if (folder / name).is_file()}


def metrics(folder: Path) -> list[dict]:
    return lines(folder / "metrics.jsonl")


def validate(settings: list[str], *more: str) -> None:
    PPOTrainer(overrides=[*settings, "trainer.val_only=true", *more]).fit()


@pytest.mark.slow
def test_the_record_of_the_training_run_is_kept(settings, tmp_path, caplog):
    run = tmp_path / "run"
    steps = ["trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=1"]
    PPOTrainer(overrides=[*settings, *steps]).fit()
    before, trained = contents(run), metrics(run)
    assert [record["step"] for record in trained if "critic/score/mean" in record] == [1, 2]
    old = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={run / 'global_step_1'}"]
    validate(settings, *steps, *old)
    assert contents(run) == before and not list(run.glob("*.dropped.jsonl"))
    (found,) = metrics(run / "val_only")
    names = {name for name in found if name.startswith("val-core/")}
    (then,) = [record for record in trained if record["step"] == 1 and names <= record.keys()]
    assert found["step"] == 1 and names and all(found[name] == then[name] for name in names)
    assert json.loads((run / "val_only" / "run.json").read_text())["state"] == "finished"

    caplog.set_level(logging.INFO, "verl")
    # the newest checkpoint; the record of the validation before it is kept too
    validate(settings, *steps, "trainer.logger=[console,jsonl]")
    said = [line.split()[0] for line in caplog.messages if line.startswith(("model:  ", "metrics:", "next:"))]
    assert said == ["metrics:", "next:"] and "verl generate" not in caplog.text  # of a model that was not trained now
    assert contents(run) == before
    assert [record["step"] for record in metrics(run / "val_only")] == [2]
    assert [record["step"] for record in metrics(run / "val_only" / "earlier_runs" / "val_only_1")] == [1]
    assert run in run_folders(run)

    PPOTrainer(overrides=[*settings, *steps, "trainer.total_training_steps=3"]).fit()  # continues as if without them
    assert metrics(run)[: len(trained)] == trained and metrics(run)[-1]["step"] == 3


def test_without_a_training_run_the_folder_has_the_validation(settings, tmp_path):
    for _ in range(2):
        validate(settings, "trainer.val_before_train=true")
        assert [record["step"] for record in metrics(tmp_path / "run")] == [0]
    assert not (tmp_path / "run" / "val_only").exists()


@pytest.mark.parametrize(
    ("about", "is_separate"),
    [
        ({"config": {"trainer.val_only": False}}, True),
        ({"config": {"trainer.val_only": True}}, False),
        ({}, True),
        (None, True),  # not readable
    ],
)
def test_whose_record_is_in_the_folder(tmp_path, about, is_separate):
    assert record_folder(tmp_path, True) == tmp_path  # none
    (tmp_path / "run.json").write_text("{" if about is None else json.dumps(about))
    assert record_folder(tmp_path, True) == (tmp_path / "val_only" if is_separate else tmp_path)
    assert record_folder(tmp_path, False) == tmp_path
