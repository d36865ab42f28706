"""Policy losses that hold up the entropy (Cui et al. 2025, "The entropy mechanism", arXiv 2505.22617).

The entropy falls by the covariance of a token's log-prob with its advantage, and a few tokens make up most of it:
cov_t = (A_t - mean A)(log_prob_t - mean log_prob). Clip-Cov takes a few of these out, KL-Cov holds them back.

The means and the choice are over the tokens *of one call*. Under gradient accumulation each micro-batch chooses its own
share of its own tokens, at least one; so these two losses, alone of all, depend on how the mini-batch is cut. For the
choice of the paper, over a mini-batch, take one micro-batch per mini-batch; trainers say so where it is cut.
"""

import torch

from verl.algorithms.masked import agg_loss, masked_mean, mean_parts, zero_padding
from verl.algorithms.policy_losses import (
    MAX_LOG_RATIO,
    LossAndMetrics,
    clip_range,
    register_policy_loss,
    weigh,
)

CHOOSE_AMONG_THE_TOKENS_OF_ONE_CALL = ("clip_cov", "kl_cov")


def _covariance(advantages: torch.Tensor, log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """cov_t, (B, T), a constant; -inf outside the mask, so that no padding is chosen."""
    log_prob = log_prob.detach()
    covariance = (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))
    return torch.where(mask.bool(), covariance, -torch.inf)


def _how_many(share: float, mask: torch.Tensor) -> int:
    """The size of a share of the tokens: at least one, unless there are none."""
    tokens = int(mask.bool().sum())
    return min(tokens, max(1, int(share * tokens)))


@register_policy_loss("clip_cov")
def clip_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    generator: torch.Generator | None = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Clip-Cov: PPO's clipped surrogate, with a few random tokens of high covariance taken out.

    clip_cov_ratio: the share of tokens to take out
    clip_cov_lb, clip_cov_ub: tokens are chosen among those with a covariance between these, that PPO does not clip
    generator: where the choice comes from; torch's global generator when not given
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)

    covariance = _covariance(advantages, log_prob, response_mask)
    candidates = ((covariance > clip_cov_lb) & (covariance < clip_cov_ub) & (clipped <= unclipped)).flatten().nonzero()
    device = "cpu" if generator is None else generator.device
    order = torch.randperm(len(candidates), generator=generator, device=device).to(candidates.device)
    chosen = candidates[order[: _how_many(clip_cov_ratio, response_mask)]]
    taken_out = torch.zeros_like(covariance, dtype=torch.bool)
    taken_out.view(-1)[chosen] = True

    losses = torch.where(taken_out, 0, torch.maximum(unclipped, clipped))
    metrics = {
        "actor/pg_clipfrac": mean_parts(taken_out, response_mask),
        "actor/ppo_kl": mean_parts(-log_ratio, response_mask),
    }
    return agg_loss(weigh(losses, rollout_is_weights, response_mask), response_mask, loss_agg_mode), metrics


@register_policy_loss("kl_cov")
def kl_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    kl_cov_ratio: float = 2e-4,
    ppo_kl_coef: float = 1.0,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """KL-Cov: -A rho, and on the tokens of highest covariance + ppo_kl_coef |log_prob - old_log_prob|. No clip.

    kl_cov_ratio: the share of tokens that are held back
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    covariance = _covariance(advantages, log_prob, response_mask)
    held_back = torch.zeros_like(covariance, dtype=torch.bool)
    held_back.view(-1)[covariance.flatten().topk(_how_many(kl_cov_ratio, response_mask)).indices] = True

    losses = -advantages * log_ratio.exp() + torch.where(held_back, ppo_kl_coef * log_ratio.abs(), 0)
    metrics = {
        "actor/kl_cov_fraction": mean_parts(held_back, response_mask),
        "actor/ppo_kl": mean_parts(-log_ratio, response_mask),
    }
    return agg_loss(weigh(losses, rollout_is_weights, response_mask), response_mask, loss_agg_mode), metrics
