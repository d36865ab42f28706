"""A worker that dies, raises or hangs, in every phase of a run: named at once, and nothing stays behind."""

import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until
from verl.processes import fork_server
from verl.single_controller import WorkerDied, WorkerError, WorkerTimeout
from verl.trainer.local_trainer import LocalPPOTrainer

FAULTS = str(Path(__file__).resolve().parent / "fault_injection.py")


def break_run(settings: list[str], monkeypatch, phase: str, kind: str, *more: str) -> tuple[WorkerError, float]:
    """The error of a run on two processes whose rank 1 fails, and the seconds from the fault's phase to the error."""
    before = set(psutil.Process().children(recursive=True))  # what other tests keep running
    monkeypatch.setenv("VERL_TEST_FAULT", f"{phase}:{kind}")
    chosen = ["algorithm.name=grpo", "trainer.n_gpus_per_node=2", "trainer.save_freq=1", f"imports=[{FAULTS}]"]
    trainer = LocalPPOTrainer(overrides=[*settings, *chosen, "trainer.total_training_steps=1", *more])
    start = time.monotonic()

    def note_start(name: str, seconds: float, batch) -> None:
        nonlocal start
        start = time.monotonic()

    trainer.pipeline.observer = note_start
    with pytest.raises(WorkerError) as error:
        trainer.fit()
    seconds = time.monotonic() - start
    before |= {psutil.Process(server.pid) for server in fork_server._servers.values()}  # they stay for the next run
    wait_until(lambda: set(psutil.Process().children(recursive=True)) <= before)
    return error.value, seconds


PHASES = ["generate", pytest.param("infer", marks=pytest.mark.slow), pytest.param("update", marks=pytest.mark.slow)]
PHASES += [pytest.param("save", marks=pytest.mark.slow)]


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_worker_is_named(phase, settings, monkeypatch):
    error, seconds = break_run(settings, monkeypatch, phase, "kill")
    assert isinstance(error, WorkerDied)
    assert (error.role, error.rank) == ("actor", 1)
    assert "SIGKILL" in str(error)
    assert seconds < 60


@pytest.mark.parametrize("phase", [pytest.param(phase, marks=pytest.mark.slow) for phase in ("generate", "update")])
def test_an_exception_on_one_rank_arrives_with_its_own_stack(phase, settings, monkeypatch):
    error, seconds = break_run(settings, monkeypatch, phase, "raise")
    assert "planted fault" in str(error)
    assert "fault_injection.py" in error.traceback
    assert error.rank == 1
    assert seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["generate", "update"])
def test_a_hang_is_named_with_all_stacks(phase, settings, monkeypatch):
    error, _ = break_run(settings, monkeypatch, phase, "hang", "trainer.worker_timeout=30")
    assert isinstance(error, WorkerTimeout)
    assert "fault_injection.py" in str(error)
