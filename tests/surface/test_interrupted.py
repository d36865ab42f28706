"""A run that is stopped by Ctrl-C or SIGTERM says where it stands, and leaves no process behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.programs import start_python
from tests.trainer.conftest import run_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # fast: signals in tests/trainer/test_saving.py, processes in tests/single_controller
@pytest.mark.parametrize(
    ("number", "processes"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)], ids=str
)
def test_a_stopped_run_says_from_which_checkpoint_it_resumes(tiny, tmp_path, number, processes):
    out = tmp_path / "run"
    settings = [*run_settings(tiny, out), "trainer.total_training_steps=100000", "trainer.save_freq=2"]
    settings += [f"trainer.n_gpus_per_node={processes}", "trainer.max_actor_ckpt_to_keep=1"]
    reader, writer = os.pipe()
    run = start_python("-m", "verl.trainer.main_ppo", *settings, stdout=writer, stderr=writer, cwd=ROOT)
    os.close(writer)
    output, lines = os.fdopen(reader), []
    for line in output:
        lines.append(line)
        if "[save]" in line and "global_step_" in line:
            break
    children = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, number)  # as a terminal does it: all processes of the group
    rest = output.read()
    output.close()
    assert run.wait(60) == 128 + number, "".join(lines) + rest
    last = rest.strip().splitlines()[-1]
    assert last.startswith(f"stopped by {number.name} after step ")
    assert f"the same command resumes from {out}/global_step_" in last
    assert "Traceback" not in rest, rest
    assert not psutil.wait_procs(children, timeout=10)[1]
    run.close()
