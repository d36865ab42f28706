"""Ray runs over two nodes continue after the loss of an actor or node."""

import os
import signal
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from tests.trainer.test_restarts import metrics, weights  # noqa: E402
from verl.single_controller.ray import cluster as ray_cluster  # noqa: E402
from verl.trainer.ray_trainer import RayPPOTrainer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ON_RAY = ["algorithm.name=grpo", "trainer.backend=ray", "trainer.device=cpu", "trainer.total_training_steps=4"]
TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.save_freq=1"]


@pytest.fixture
def nodes():
    """Two nodes on this host, of 1 CPU each; and the second one."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address)
    yield nodes, second
    ray.shutdown()
    nodes.shutdown()


def run(settings: list[str], folder: Path, *more: str) -> RayPPOTrainer:
    return RayPPOTrainer(overrides=[*settings, *ON_RAY, *TWO_NODES, f"trainer.default_local_dir={folder}", *more])


def strike_at(trainer: RayPPOTrainer, step: int, strike) -> None:
    """Call `strike` once, when `gen` of a step has ended."""
    left = [strike]

    def observe(name: str, seconds: float, batch) -> None:
        if name == "gen" and trainer.global_step == step and left:
            left.pop()()

    trainer.pipeline.observer = observe


def test_a_killed_actor_changes_no_number(nodes, settings, tmp_path):
    run(settings, tmp_path / "straight").fit()
    trainer = run(settings, tmp_path / "killed", "trainer.max_restarts=1")
    strike_at(trainer, 3, lambda: os.kill(trainer.roles["actor"]._pool._ranks[1].info.pid, signal.SIGKILL))
    assert trainer.fit()["training/restarts"] == 1
    assert weights(tmp_path / "killed", 4) == weights(tmp_path / "straight", 4)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "straight")


def test_a_lost_node_leaves_a_smaller_run(nodes, settings, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ray_cluster, "REPLACEMENT_SECONDS", 3.0)
    cluster, second = nodes
    trainer = run(settings, tmp_path / "run", "trainer.max_restarts=1", "trainer.allow_smaller=true")
    strike_at(trainer, 3, lambda: cluster.remove_node(second))
    last = trainer.fit()
    assert last["training/restarts"] == 1 and last["training/global_step"] == 4
    assert trainer.roles == {} and trainer.config.trainer.nnodes == 1
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert "restart 1 of 1 after an error in step 3" in caplog.text and "1 x 1 instead of 2 x 1" in caplog.text
