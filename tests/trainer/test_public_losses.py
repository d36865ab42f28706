"""An estimator and a policy loss in the form of public verl run unchanged: one training step with each."""

from tests.trainer.runs import fit

OWN_METRICS = ("actor/clip_c", "actor/clip_low")
THEIRS = '''
"""Written for public verl: nothing here is specific to this project."""
from typing import Any, Optional

import numpy as np
import torch

import verl.utils.torch_functional as verl_F
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_adv_est("half_group_mean")
def half_group_mean(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: Optional[Any] = None,
    **kwargs,
):
    with torch.no_grad():
        scores = token_level_rewards.sum(dim=-1)
        for name in set(index):
            rows = np.nonzero(index == name)[0]
            scores[rows] = scores[rows] - 0.5 * scores[rows].mean()
        assert config.get("gamma", 1.0) == config.gamma == 1.0
        return scores.unsqueeze(-1) * response_mask, scores.unsqueeze(-1) * response_mask


@register_policy_loss("one_sided")
def one_sided(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Optional[Any] = None,
    rollout_is_weights: torch.Tensor | None = None,
):
    assert config is not None
    clip_low = config.clip_ratio_low if config.clip_ratio_low is not None else config.clip_ratio
    clip_high = config.clip_ratio_high if config.clip_ratio_high is not None else config.clip_ratio
    clip_c = config.get("clip_ratio_c", 3.0)
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    ppo_kl = verl_F.masked_mean(old_log_prob - log_prob, response_mask)
    losses = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - clip_low, 1 + clip_high))
    pg_loss = agg_loss(
        loss_mat=losses,
        loss_mask=response_mask,
        loss_agg_mode=config.loss_agg_mode,
        **config.global_batch_info,
    )
    return pg_loss, {"actor/clip_c": clip_c, "actor/clip_low": clip_low, "actor/ppo_kl": ppo_kl.detach().item()}
'''

STEP = ["trainer.total_training_steps=1", "trainer.save_at_end=false", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]


def one_step(settings: list[str], *overrides: str) -> dict[str, float]:
    """The metrics of one step with one update."""
    _, (report,) = fit([*settings, *STEP, "algorithm.use_kl_in_reward=false", *overrides])
    return report.metrics


def test_an_estimator_and_a_loss_of_public_verl(settings, tmp_path):
    """Two micro-batches. The first update is on-policy, so the clip is inactive and the gradient is that of -A."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    names = ["algorithm.adv_estimator=half_group_mean", "actor_rollout_ref.actor.policy_loss.loss_mode=one_sided"]
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="
    run = [f"imports=[{tmp_path / 'theirs.py'}]", *names]
    found = one_step(settings, *run, micro + "4", f"trainer.default_local_dir={tmp_path / 'a'}")
    assert found["actor/clip_c"] == 3.0 and found["actor/clip_low"] == 0.2
    assert found["actor/grad_norm"] > 0 and abs(found["actor/ppo_kl"]) < 1e-5
    # the advantage is the reward less half the mean of its group, so its mean is half the mean reward
    rewards, advantages = found["critic/rewards/mean"], found["critic/advantages/mean"]
    assert 0 < advantages < rewards

    # the mini-batch, not the micro-batch, is normalized over; and with one on-policy update it is PPO's loss
    whole = one_step(settings, *run, micro + "8", f"trainer.default_local_dir={tmp_path / 'b'}")
    own = [run[0], names[0], micro + "8", f"trainer.default_local_dir={tmp_path / 'c'}"]
    vanilla = one_step(settings, *own)
    for other in (whole, vanilla):
        assert abs(other["actor/grad_norm"] / found["actor/grad_norm"] - 1) < 1e-4
        assert abs(other["actor/pg_loss"] - found["actor/pg_loss"]) < 1e-6


def test_replacing_compute_policy_loss_in_an_imported_file_changes_the_training(settings, tmp_path, monkeypatch):
    from verl.algorithms import policy_losses

    monkeypatch.setattr(policy_losses, "compute_policy_loss", policy_losses.compute_policy_loss)  # restored at the end
    (tmp_path / "edit.py").write_text(
        "from verl.trainer.ppo import core_algos\n"
        "original = core_algos.compute_policy_loss\n"
        "def compute_policy_loss(*args, **kwargs):\n"
        "    loss, clipfrac, kl, lower = original(*args, **kwargs)\n"
        "    return loss * 0, clipfrac + 0.5, kl, lower\n"
        "core_algos.compute_policy_loss = compute_policy_loss\n"
    )
    found = one_step(settings, f"imports=[{tmp_path / 'edit.py'}]", "algorithm.adv_estimator=grpo")
    assert found["actor/pg_clipfrac"] == 0.5 and found["actor/grad_norm"] == 0
