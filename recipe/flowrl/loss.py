"""The policy loss `flowrl`, and the partition function that it reads."""

from collections.abc import Sequence

import torch

from verl.algorithms.masked import Groups, force_mode, masked_mean, zero_padding
from verl.algorithms.policy_losses import LossAndMetrics, weighted_loss


@torch.no_grad()
def log_partition(
    advantages: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    *,
    beta: float,
) -> torch.Tensor:
    """log Z of each prompt, (B,): the mean over its responses of beta A + mean_t(log ref - log old).

    With it, the residuals of a prompt have mean 0 at the old policy (Richter et al. 2020, arXiv 2010.10436).

    Args:
        advantages, old_log_probs, ref_log_prob, response_mask: (B, T).
        uid: (B,) identifies the prompt of each sample.
        beta: weight of the advantages.
    """
    advantages, old, ref = zero_padding(response_mask, advantages, old_log_probs, ref_log_prob)
    target = masked_mean(beta * advantages + ref - old, response_mask, -1).double()
    groups = Groups(uid, response_mask.bool().any(-1))
    return groups.mean(target).to(advantages.dtype)


def flowrl(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    ref_log_prob: torch.Tensor,
    log_z: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    *,
    flowrl_beta: float = 15.0,
    clip_ratio_high: float = 0.2,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Trajectory balance with length normalization (Zhu et al. 2025, arXiv 2509.15207).

        L = mean_i w_i (log Z + mean_t(log_prob) - beta mean_t(A) - mean_t(ref_log_prob))^2

    The minimum is a policy proportional to ref * exp(beta A), in which not only the best response is likely. w is the
    geometric mean of the token ratios of the current to the old policy, at most 1 + clip_ratio_high, without gradient.
    `loss_agg_mode` is ignored.

    Args:
        log_z: (B,), see `log_partition`.
        flowrl_beta: beta, the inverse temperature of the rewards.
        clip_ratio_high: bound of w.
    """
    old, new, advantages, ref = zero_padding(response_mask, old_log_prob, log_prob, advantages, ref_log_prob)
    target = masked_mean(flowrl_beta * advantages + ref, response_mask, -1)
    residual = log_z + masked_mean(new, response_mask, -1) - target
    weight = masked_mean(new - old, response_mask, -1).detach().exp().clamp(max=1 + clip_ratio_high)
    losses = (weight * residual.square())[:, None].expand_as(new)
    metrics = {"flowrl_residual": residual.detach().abs()[:, None].expand_as(new), "ppo_kl": old - new}
    return weighted_loss(
        losses, rollout_is_weights, response_mask, force_mode(loss_agg_mode, "seq-mean-token-mean"), **metrics
    )
