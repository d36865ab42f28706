"""The last lines of a run that has failed."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def ranks_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The processes of the ranks, in the order of their start."""
    server = "verl.processes.fork_server"
    children = psutil.Process(run.pid).children(recursive=True)
    found = [child for child in children if server in child.cmdline() and server in child.parent().cmdline()]
    return sorted(found, key=lambda child: child.create_time())


def wait_for_steps(run: subprocess.Popen, folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 200
    while len(list(folder.glob("global_step_*"))) < steps:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_the_last_lines_are_the_cause_and_how_to_resume(settings, tmp_path):
    more = ["algorithm.name=grpo", "trainer.n_gpus_per_node=2", "trainer.save_freq=1"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings, *more, "trainer.total_epochs=500"]
    with (tmp_path / "log").open("w") as log:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        run = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for_steps(run, tmp_path / "run", 2)
            killed = ranks_of(run)[1].pid
            os.kill(killed, signal.SIGKILL)
            assert run.wait(60) == 1
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    *_, cause, checkpoint, resume = (tmp_path / "log").read_text().rstrip().splitlines()
    assert cause.startswith("the run failed in step ") and f"process {killed} was killed by SIGKILL" in cause
    assert "on rank 1" in cause
    assert checkpoint.startswith("the same command resumes from ") and "global_step_" in checkpoint
    assert resume.split()[:3] == ["python", "-m", "verl.trainer.main_ppo"] and shlex.split(resume)[3:] == command[3:]
