"""What holds for every recipe: a resumed run is the uninterrupted one, and two processes give the numbers of one."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import fit, metrics_of
from verl.trainer.view import StepReport


def _folder(settings: list[str]) -> Path:
    """Of the run."""
    (folder,) = (Path(key.partition("=")[2]) for key in settings if key.startswith("trainer.default_local_dir="))
    return folder


def assert_resumes(settings: list[str], kind: type, steps: int) -> None:
    """A run that stops one step before its end and is resumed logs of that step what an uninterrupted run does."""
    folder = _folder(settings)
    saving, last = [f"trainer.save_freq={steps - 1}", "trainer.save_at_end=false"], []
    for name, more, stops in (("whole", ["trainer.save_freq=-1"], [steps]), ("resumed", saving, [steps - 1, steps])):
        for stop in stops:
            more = [*more, f"trainer.default_local_dir={folder / name}", f"trainer.total_training_steps={stop}"]
            _, reports = fit([*settings, *more], kind)
        assert reports[0].step == (1 if name == "whole" else steps)
        last.append(metrics_of(folder / name)[steps])
    assert last[0] == last[1]


def assert_same_on_two_processes(settings: list[str], kind: type, *metrics: str) -> tuple[Any, list[StepReport]]:
    """Two steps of one and of two processes, in the folders 1 and 2, have the same metrics. Returns the run of two."""
    found, folder = [], _folder(settings)
    for processes in (1, 2):
        more = [f"trainer.n_gpus_per_node={processes}", f"trainer.default_local_dir={folder / str(processes)}"]
        more += ["trainer.total_training_steps=2"]
        trainer, reports = fit([*settings, *more], kind)
        found.append([report.metrics[name] for report in reports for name in metrics])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    return trainer, reports
