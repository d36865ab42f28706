"""Runs that lose a worker: they continue by themselves, with the numbers of an undisturbed run."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.trainer.conftest import run_settings
from tests.trainer.runs import metrics_of
from verl.single_controller import WorkerDied
from verl.trainer.guards.restarts import settings_for_devices_left
from verl.trainer.local_trainer import LocalPPOTrainer

PROCESSES = ["algorithm.name=grpo", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=4"]


def weights(run: Path, step: int) -> dict:
    """The weights and optimizer files of a checkpoint, as bytes."""
    folder = run / f"global_step_{step}"
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".safetensors", ".distcp")]
    assert files
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def metrics(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step that are no times."""
    return metrics_of(run, "training/restarts", "weight_sync/")


def rank_pid(trainer: LocalPPOTrainer, rank: int) -> int:
    return trainer.roles["actor"]._pool._ranks[rank].process.pid


def strike_at(trainer: LocalPPOTrainer, step: int, number: int, times: int = 1, rank: int = 1) -> None:
    """Send a signal to a rank when `gen` of a step has ended, in the first `times` attempts."""
    left = [times]

    def strike(name: str, seconds: float, batch) -> None:
        if name == "gen" and trainer.global_step == step and left[0]:
            left[0] -= 1
            os.kill(rank_pid(trainer, rank), number)

    trainer.pipeline.observer = strike


def run(settings: list[str], folder: Path, *more: str) -> LocalPPOTrainer:
    return LocalPPOTrainer(overrides=[*settings, *PROCESSES, f"trainer.default_local_dir={folder}", *more])


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory) -> Path:
    """An undisturbed run of 4 steps."""
    folder = tmp_path_factory.mktemp("straight")
    run(run_settings(tiny, folder), folder, "trainer.save_freq=4").fit()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("save_freq", "source"), [(1, "global_step_2"), (-1, "the start")])
def test_a_killed_rank_changes_no_number(save_freq, source, straight, settings, tmp_path, caplog):
    saving = [f"trainer.save_freq={save_freq}", "trainer.save_at_end=true", "trainer.max_restarts=1"]
    trainer = run(settings, tmp_path / "killed", *saving)
    strike_at(trainer, 3, signal.SIGKILL)
    assert trainer.fit()["training/restarts"] == 1
    assert weights(tmp_path / "killed", 4) == weights(straight, 4)
    assert metrics(tmp_path / "killed") == metrics(straight)
    assert "restart 1 of 1 after an error in step 3" in caplog.text and source in caplog.text
    assert "restart 1 of 1 after an error in step 3" in (tmp_path / "killed" / "warnings.jsonl").read_text()
    assert "was killed by SIGKILL" in caplog.text


@pytest.mark.slow
def test_a_restart_ignores_checkpoints_that_the_run_was_told_to_ignore(straight, settings, tmp_path):
    shutil.copytree(straight / "global_step_4", tmp_path / "run" / "global_step_4")
    saving = ["trainer.save_freq=4", "trainer.max_restarts=1", "trainer.resume_mode=disable"]
    trainer = run(settings, tmp_path / "run", *saving)
    strike_at(trainer, 2, signal.SIGKILL)
    assert trainer.fit()["training/restarts"] == 1
    assert len(metrics(tmp_path / "run")) == 4
    assert weights(tmp_path / "run", 4) == weights(straight, 4)


@pytest.mark.slow
def test_a_stopped_rank_restarts_after_the_limit(settings, tmp_path, caplog):
    waits = ["trainer.wait_minimum=4", "trainer.max_restarts=1", "trainer.save_freq=1"]
    trainer = run(settings, tmp_path / "run", *waits)
    strike_at(trainer, 3, signal.SIGSTOP)
    assert trainer.fit()["training/restarts"] == 1
    assert "is stopped: SIGSTOP" in caplog.text


@pytest.mark.slow
def test_a_run_that_was_asked_to_end_does_not_restart(settings, tmp_path):
    trainer = run(settings, tmp_path / "run", "trainer.save_freq=1", "trainer.max_restarts=3")
    left = [1]

    def strike(name: str, seconds: float, batch) -> None:
        if name == "gen" and trainer.global_step == 2 and left[0]:
            left[0] -= 1
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(rank_pid(trainer, 1), signal.SIGKILL)

    trainer.pipeline.observer = strike
    with pytest.raises(WorkerDied) as error:
        trainer.fit()
    assert "no restart: SIGTERM was received" in error.value.__notes__
    assert trainer.global_step == 1 and trainer.view.restarts == 0
    assert trainer.fit()["training/global_step"] == 4  # the signal was one to the first `fit`


def lengths(metrics: dict) -> tuple:
    """Values of a step that depend on the weights and on the prompts."""
    return tuple(metrics[name] for name in ("training/global_step", "response_length/mean", "actor/entropy"))


@pytest.mark.fast("auto")
@pytest.mark.parametrize("resume_mode", ["auto", "disable"])
def test_rewind_returns_to_the_last_checkpoint(settings, resume_mode):
    more = ["algorithm.name=grpo", "trainer.save_at_end=false", f"trainer.resume_mode={resume_mode}"]
    trainer = LocalPPOTrainer(overrides=[*settings, *more, "trainer.total_training_steps=9"])
    steps = []
    trainer.on_step.append(lambda report: steps.append(lengths(report.metrics)))
    trainer.fit(steps=2)
    trainer.save()
    trainer.fit(steps=2)
    trainer.rewind()
    assert trainer.global_step == 2
    trainer.fit(steps=2)
    assert [step for step, *_ in steps] == [1, 2, 3, 4, 3, 4]
    assert steps[4:] == steps[2:4] and steps[2] != steps[3]
    trainer.shutdown()
    trainer.rewind()  # now new workers load it
    assert trainer.global_step == 0
    trainer.fit(steps=2)
    assert steps[6:] == steps[2:4]


@pytest.mark.fast("True")
@pytest.mark.parametrize("by_fit", [True, False])
def test_rewind_without_a_checkpoint_returns_to_the_start(by_fit, settings):
    trainer = LocalPPOTrainer(overrides=[*settings, "algorithm.name=grpo", "trainer.save_at_end=false"])
    with pytest.raises(ValueError, match="cannot return to an earlier step: there is no checkpoint in "):
        trainer.rewind()
    steps = []
    trainer.on_step.append(lambda report: steps.append(lengths(report.metrics)))

    def two_steps() -> None:
        if by_fit:
            trainer.fit(steps=2)
        else:  # a custom loop
            steps.extend(lengths(trainer.step()) for _ in range(2))

    two_steps()
    trainer.rewind()
    assert trainer.global_step == 0
    two_steps()
    assert steps[2:] == steps[:2] and steps[0] != steps[1]
    trainer.shutdown()


def test_a_rewind_that_is_refused_keeps_the_weights(settings):
    more = ["algorithm.name=grpo", "trainer.save_at_end=false"]
    trainer = LocalPPOTrainer(overrides=[*settings, *more])
    trainer.fit(steps=1)
    trainer.checkpointer._initial = None  # as in a run whose checkpoint was removed
    with pytest.raises(ValueError, match="cannot return to an earlier step: there is no checkpoint in "):
        trainer.rewind()
    assert trainer.global_step == 1 and "workers started" in repr(trainer)
    trainer.step()
    assert trainer.global_step == 2
    trainer.shutdown()


@pytest.mark.parametrize(
    ("limit", "restarts", "notes"),
    [
        (5, 2, ["no restart: the same error has ended step 1 before"]),
        (1, 1, ["no restart: trainer.max_restarts is 1"]),
        (0, 0, []),
    ],
)
def test_an_error_may_end_a_step_once(limit, restarts, notes, settings):
    """Numbers, such as those of processes, and further lines do not make it another one."""
    more = ["algorithm.name=grpo", f"trainer.max_restarts={limit}", "trainer.total_training_steps=2"]
    trainer = LocalPPOTrainer(overrides=[*settings, *more])
    messages = ["process 12 was killed\nfirst log", "host 3 is lost\nsecond log", "process 345 was killed\nthird log"]

    def lose(name: str, seconds: float, batch) -> None:
        if name == "gen" and messages:
            raise WorkerDied(messages.pop(0), role="actor", method="update_actor", rank=0)

    trainer.pipeline.observer = lose
    with pytest.raises(WorkerDied) as error:
        trainer.fit()
    assert trainer.view.restarts == restarts and len(messages) == 2 - restarts
    assert [note for note in getattr(error.value, "__notes__", []) if "restart" in note] == notes


def test_the_devices_that_are_left_are_used_if_the_settings_allow_it(settings, monkeypatch, caplog):
    trainer = LocalPPOTrainer(overrides=[*settings, "trainer.n_gpus_per_node=4", "trainer.allow_smaller=true"])
    left, error = [(1, 3), (1, 2), (1, 1)], WorkerDied("killed", role="actor", method="update_actor", rank=3)
    monkeypatch.setattr(trainer.cluster, "sizes_left", lambda *now: left)
    config = settings_for_devices_left(trainer.view, error).trainer
    assert (config.nnodes, config.n_gpus_per_node) == (1, 2)
    assert "the run continues with 1 x 2 instead of 1 x 4 devices" in caplog.text
    assert "1 nodes with 3 processes are not possible" in error.__notes__[0]
    left.clear()
    with pytest.raises(WorkerDied) as raised:
        settings_for_devices_left(trainer.view, error)
    assert "no restart: the devices that are left are not sufficient" in raised.value.__notes__


def lose_a_worker(trainer: LocalPPOTrainer, monkeypatch, name: str, times: int) -> None:
    """Let a method of the trainer raise as if a worker were killed in it, the first times it is called."""
    left, method = [times], getattr(trainer, name)

    def call():
        if left[0]:
            left[0] -= 1
            raise WorkerDied("killed", role="actor", method="update_actor", rank=0)
        return method()

    monkeypatch.setattr(trainer, name, call)


def test_the_steps_of_fit_count_if_its_first_start_fails(settings, tmp_path, monkeypatch):
    trainer = LocalPPOTrainer(overrides=[*settings, "algorithm.name=grpo", "trainer.max_restarts=1"])
    lose_a_worker(trainer, monkeypatch, "load", 1)
    assert trainer.fit(steps=2)["training/restarts"] == 1
    assert trainer.global_step == 2


def test_a_checkpoint_that_was_lost_while_being_written_is_written_again(settings, tmp_path, monkeypatch):
    saving = ["trainer.save_freq=2", "trainer.total_training_steps=2", "trainer.max_restarts=1"]
    trainer = LocalPPOTrainer(overrides=[*settings, "algorithm.name=grpo", *saving])
    left, complete = [1], trainer.checkpointer.poll

    def lose(wait: bool = False) -> None:
        """As if a worker were killed while it writes in the background."""
        pending = trainer.checkpointer._pending
        if pending is not None and left[0]:
            left[0], trainer.checkpointer._pending = 0, None
            with pending.folder:
                raise WorkerDied("killed", role="actor", method="update_actor", rank=0)
        complete(wait)

    monkeypatch.setattr(trainer.checkpointer, "poll", lose)
    assert trainer.fit()["training/restarts"] == 1
    assert (tmp_path / "run" / "global_step_2" / "actor").is_dir()
