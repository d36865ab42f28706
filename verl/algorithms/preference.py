"""SPPO: self-play preference optimization."""

from collections.abc import Sequence

import torch

from verl.algorithms.advantages import GroupedRewards, register_adv_est
from verl.algorithms.masked import force_mode, masked_mean, zero_padding
from verl.algorithms.policy_losses import LossAndMetrics, register_policy_loss, weighted_loss


@register_adv_est("sppo", min_group_size=2)
@torch.no_grad()
def sppo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, uid: Sequence, *, sppo_beta: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Self-play preference optimization (Wu et al. 2024, arXiv 2405.00675): reward minus a soft maximum of the group.

        A_i = R_i - (1 / b) (logsumexp_j(b R_j) - ln n), with b = sppo_beta

    The baseline lies between the mean (b -> 0) and the maximum (b -> inf). Use it with the policy loss `sppo`.
    """
    grouped = GroupedRewards("sppo", token_level_rewards, response_mask, uid)
    groups, reward = grouped.groups, grouped.reward
    best = groups.max(reward)  # subtracted in the exponent, so that it cannot overflow
    mean_exp = groups.mean(torch.exp(sppo_beta * (reward - best)))
    return grouped.spread(reward - best - mean_exp.clamp(min=1e-300).log() / sppo_beta)


@register_policy_loss("sppo")
def sppo_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    *,
    sppo_eta: float = 1.0,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """SPPO (Wu et al. 2024, arXiv 2405.00675): regress the log-ratio of a response on its advantage.

        L = mean_i (sum_t (log_prob - old_log_prob) - eta mean_t A)^2, with eta = sppo_eta

    `loss_agg_mode` is ignored: always the mean over responses. Use it with the estimator `sppo`.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).sum(-1)
    losses = ((log_ratio - sppo_eta * masked_mean(advantages, response_mask, -1)) ** 2).unsqueeze(-1)
    mode, ppo_kl = force_mode(loss_agg_mode, "seq-mean-token-mean"), old_log_prob - log_prob
    return weighted_loss(losses.expand_as(log_prob), rollout_is_weights, response_mask, mode, ppo_kl=ppo_kl)
