"""The last lines of a run that has failed."""

import sys
from types import SimpleNamespace

import pytest

from verl.single_controller import WorkerDied
from verl.trainer.startup import launch

RESUMES = "the same command resumes from run/global_step_2"


@pytest.mark.parametrize(
    ("mode", "saved", "word", "last"),
    [
        ("auto", "run/global_step_2", "b=c d", "  python -m verl.trainer.main_ppo a=1 'b=c d'"),
        ("disable", "run/global_step_2", "b=c", "  python -m verl.trainer.main_ppo a=1 b=c trainer.resume_mode=auto"),
        ("auto", None, "b=c", RESUMES),
        ("auto", "run/global_step_2", "b=https://me:password@host/c", RESUMES),
    ],
)
def test_the_last_lines_are_the_cause_and_how_to_resume(mode, saved, word, last, monkeypatch):
    """A command line with a secret is not printed."""
    command = ["python", "-m", "verl.trainer.main_ppo", "a=1", word]
    monkeypatch.setattr(sys, "orig_argv", command)
    monkeypatch.setattr(sys, "argv", ["main_ppo.py", *command[3:]])
    text = "process 7 was killed by SIGKILL; states and stacks of all ranks:\nrank 0 is running"
    error = WorkerDied(text, role="actor", method="update_actor", rank=1)

    def fit() -> None:
        raise error

    trainer = SimpleNamespace(
        fit=fit,
        view=SimpleNamespace(ready=True),
        config=SimpleNamespace(trainer=SimpleNamespace(resume_mode=mode)),
        checkpointer=SimpleNamespace(newest_of_run=lambda: saved),
        progress_summary=lambda: f"in step 3 of 9; {RESUMES}",
    )
    with pytest.raises(WorkerDied):
        launch.fit(trainer)
    cause, *_, line = error.__notes__[-1].splitlines()
    assert cause.startswith("the run failed in step 3 of 9: actor.update_actor() on rank 1 (")
    assert cause.endswith("): process 7 was killed by SIGKILL")
    assert line.removesuffix(":") == last
