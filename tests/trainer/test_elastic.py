"""Checkpoints go on with another number of ranks."""

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
        more = [f"trainer.n_gpus_per_node={ranks}", f"trainer.total_training_steps={steps}"]
        overrides = [*settings, *GRPO, contents, *more, f"trainer.default_local_dir={folder}"]
        LocalPPOTrainer(overrides=overrides).fit()

    run(1, 4, tmp_path / "straight")
    run(first, 2, tmp_path / "elastic")
    run(then, 4, tmp_path / "elastic")
    expected, found = (weights(tmp_path / name / "global_step_4/actor/huggingface") for name in ("straight", "elastic"))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-4), name
