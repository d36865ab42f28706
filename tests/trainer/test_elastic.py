"""Checkpoints go on with another number of ranks, and a run goes over several nodes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.trainer.local_trainer import LocalPPOTrainer

GRPO = ["algorithm.name=grpo", "actor_rollout_ref.actor.use_kl_loss=false", "trainer.save_freq=1"]


def weights(folder) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (2, 4), (1, 2)])
def test_a_checkpoint_resumes_with_other_ranks(first, then, settings, tmp_path):
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"

    def run(ranks: int, steps: int, folder: str) -> None:
        overrides = [
            *settings,
            *GRPO,
            contents,
            f"trainer.n_gpus_per_node={ranks}",
            f"trainer.default_local_dir={folder}",
        ]
        LocalPPOTrainer(overrides=[*overrides, f"trainer.total_training_steps={steps}"]).fit()

    run(1, 4, tmp_path / "straight")
    run(first, 2, tmp_path / "elastic")
    run(then, 4, tmp_path / "elastic")
    expected, found = (weights(tmp_path / name / "global_step_4/actor/huggingface") for name in ("straight", "elastic"))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-4), name


@pytest.mark.slow
def test_training_over_two_ray_nodes(settings):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from verl.trainer.ray_trainer import RayPPOTrainer

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address)
        trainer = RayPPOTrainer(
            overrides=[
                *settings,
                *GRPO,
                "trainer.backend=ray",
                "trainer.nnodes=2",
                "trainer.n_gpus_per_node=1",
                "trainer.device=cpu",
                "trainer.total_training_steps=2",
            ]
        )
        spread = trainer.fit()
    finally:
        ray.shutdown()
        cluster.shutdown()
    again = [*settings, *GRPO, "trainer.resume_mode=disable", "trainer.total_training_steps=2"]
    alone = LocalPPOTrainer(overrides=again).fit()
    for name in ("critic/score/mean", "actor/entropy", "actor/grad_norm"):
        assert spread[name] == pytest.approx(alone[name], rel=1e-3), name
