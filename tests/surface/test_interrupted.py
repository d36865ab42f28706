"""A run that is stopped by Ctrl-C or SIGTERM says where it stands, and leaves no process behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.trainer.conftest import run_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("number", "processes", "word"),
    [
        pytest.param(signal.SIGINT, 1, "SIGINT", marks=pytest.mark.slow),
        (signal.SIGTERM, 1, "SIGTERM"),
        pytest.param(signal.SIGINT, 2, "SIGINT", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_says_from_which_checkpoint_it_resumes(tiny, tmp_path, number, processes, word):
    out = tmp_path / "run"
    settings = [*run_settings(tiny, out), "trainer.total_training_steps=100000", "trainer.save_freq=2"]
    settings += [f"trainer.n_gpus_per_node={processes}", "trainer.max_actor_ckpt_to_keep=1"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    lines = []
    for line in run.stdout:
        lines.append(line)
        if "[save]" in line and "global_step_" in line:
            break
    children = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, number)  # as a terminal does it: all processes of the group
    rest = run.communicate(timeout=60)[0]
    assert run.returncode == 128 + number, "".join(lines) + rest
    last = rest.strip().splitlines()[-1]
    assert last.startswith(f"stopped by {word} in step ")
    assert f"the same command resumes from {out}/global_step_" in last
    assert "Traceback" not in rest, rest
    assert not psutil.wait_procs(children, timeout=10)[1]
