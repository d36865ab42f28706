"""A run on Ray that asks for more than there is: said at once, ended by Ctrl-C, and refused where it cannot come."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.trainer.main_ppo import main

ROOT = Path(__file__).parents[2]
ON_RAY = ["algorithm.adv_estimator=grpo", "trainer.backend=ray", "trainer.device=cpu"]
LOCAL = ["ray_kwargs.ray_init.address=local", "ray_kwargs.ray_init.num_cpus=2"]
STEPS = ["trainer.total_training_steps=2"]


@pytest.mark.slow
def test_a_ray_started_for_the_run_cannot_grow(settings, capsys):
    pytest.importorskip("ray")
    started = ["ray_kwargs.ray_init.address=local", "ray_kwargs.ray_init.num_cpus=1"]
    begun = time.monotonic()
    assert main([*settings, *ON_RAY, *started, "trainer.nnodes=2"]) == 1
    assert time.monotonic() - begun < 60
    shown = capsys.readouterr().err
    assert "requires 2 nodes with 1 CPU, which the cluster did not provide" in shown
    assert "it has 1 node with 1 CPU, of which " in shown
    assert "start Ray on every node first (`ray start`)" in shown and "docs/multinode.md" in shown


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_ray_started_for_the_run_listens_on_loopback_only(settings):
    """All its processes, the workers and the driver included."""
    pytest.importorskip("ray")
    from tests.sockets import listening, processes_below
    from verl.trainer.ray_trainer import RayPPOTrainer

    trainer, found = RayPPOTrainer(overrides=[*settings, *ON_RAY, "trainer.n_gpus_per_node=2", *STEPS, *LOCAL]), {}
    below = [os.getpid()]
    trainer.on_step.append(lambda _: below.extend(processes_below(os.getpid())))
    trainer.on_step.append(lambda _: found.update({pid: listening(pid) for pid in below}))
    trainer.fit()
    addresses = [address for process in found.values() for address in process]
    assert len(found) > 5 and len(addresses) > 5  # gcs, raylet, driver, two workers, the store of their group
    assert all(address.is_loopback for address in addresses), addresses


@pytest.mark.slow
def test_waiting_for_nodes_is_said_and_ends_with_ctrl_c(settings, tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    run = None
    try:
        arguments = [*settings, *ON_RAY, f"ray_kwargs.ray_init.address={nodes.address}", "trainer.nnodes=2"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        with (tmp_path / "log").open("w") as log:
            command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
            run = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 100
        while "waiting for 2 nodes with 1 CPU; the cluster has 1 node with 1 CPU" not in (tmp_path / "log").read_text():
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 128 + signal.SIGINT
        assert "stopped by SIGINT" in (tmp_path / "log").read_text()
    finally:
        if run is not None and run.poll() is None:
            run.kill()
        nodes.shutdown()
