"""Policy losses for off-policy data: stale weights, or training-inference mismatch.

There are up to three policies: the one that sampled (`rollout_log_probs`), the one before the update (`old_log_prob`)
and the current one (`log_prob`). In bypass mode `old_log_prob` is the log-prob of the rollout engine, which leaves two.
"""

import torch

from verl.algorithms.masked import mean_parts, zero_padding
from verl.algorithms.policy_losses import (
    MAX_LOG_RATIO,
    LossAndMetrics,
    register_policy_loss,
    reinforce,
    vanilla,
    weighted_loss,
)
from verl.algorithms.rollout_correction import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    mismatch,
)
from verl.registry import did_you_mean


@register_policy_loss("decoupled_ppo")
def decoupled_ppo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    rollout_log_probs: torch.Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
    rollout_is_threshold: float = 2.0,
) -> LossAndMetrics:
    """Decoupled PPO for stale data (Hilton et al. 2021, arXiv 2110.00641; AReaL, Fu et al. 2025, arXiv 2505.24298).

        L = min(pi_prox / pi_behav, C) * clipped surrogate of pi / pi_prox

    The clip is around a recent (proximal) policy, and the truncated constant weight corrects for the behavior policy
    that sampled.

    Args:
        old_log_prob: (B, T), of the proximal policy.
        rollout_log_probs: (B, T), of the behavior policy.
        rollout_is_threshold: C. There is no `rollout_is_weights` here: it would apply the same weight twice.
    """
    x = mismatch(old_log_prob.detach(), rollout_log_probs, response_mask)
    weights, _ = compute_rollout_correction_weights(x, response_mask, "token", rollout_is_threshold)
    columns = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode)
    clip = {"clip_ratio": clip_ratio, "clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high}
    loss, metrics = vanilla(*columns, **clip, clip_ratio_c=clip_ratio_c, rollout_is_weights=weights)
    return loss, metrics | {"actor/behav_weight": mean_parts(weights, response_mask)}


@register_policy_loss("bypass_mode")
def bypass_mode(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    loss_type: str = "ppo_clip",
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> LossAndMetrics:
    """Rollout log-probs as old log-probs: saves a forward pass, and corrects against the current policy.

        ppo_clip:  `vanilla`; its ratio is already the importance ratio, so no weight is applied
        reinforce: `reinforce` with the weights of `rollout_is`, from the current log-probs

    Rejection (`rollout_rs`) removes tokens from the loss; the counts of the aggregation stay those of `response_mask`.

    Args:
        old_log_prob: (B, T), of the rollout engine.
        loss_type: "ppo_clip" or "reinforce".
        rollout_is, rollout_is_threshold, rollout_rs, rollout_rs_threshold: as in `rollout_correction`.
    """
    if loss_type not in ("ppo_clip", "reinforce"):
        raise ValueError(
            f"no loss_type is called {loss_type!r}: {did_you_mean(str(loss_type), ('ppo_clip', 'reinforce'))}"
        )
    if rollout_is_batch_normalize:
        raise ValueError(
            "rollout_is_batch_normalize needs the weights of the whole batch, but bypass_mode computes them per "
            "micro-batch: set it to false, or bypass_mode=false"
        )
    x = mismatch(log_prob.detach(), old_log_prob, response_mask)
    weights, metrics = torch.ones_like(x), {}
    if loss_type == "reinforce" and rollout_is is not None:
        weights, metrics = compute_rollout_correction_weights(x, response_mask, rollout_is, rollout_is_threshold)
    if rollout_rs is not None:
        accepted, rejected = compute_rollout_rejection_mask(x, response_mask, rollout_rs, rollout_rs_threshold)
        weights, metrics = weights * accepted, metrics | rejected
    columns = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode)
    if loss_type == "reinforce":
        loss, loss_metrics = reinforce(*columns, rollout_is_weights=weights)
    else:
        clip = {"clip_ratio": clip_ratio, "clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high}
        loss, loss_metrics = vanilla(*columns, **clip, clip_ratio_c=clip_ratio_c, rollout_is_weights=weights)
    return loss, metrics | loss_metrics


@register_policy_loss("dppo_tv")
def dppo_tv(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 20.0,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Divergence PPO with total variation (arXiv 2602.04879): a bound on the change of probability, not on the ratio.

        L = -A stop_gradient(min(rho, c)) log_prob
        dropped where A > 0 and p - p_old > high, or A < 0 and p_old - p > low

    For rare tokens a large ratio is a small change of probability, so they keep their gradient.

    Args:
        clip_ratio_low: bound on the decrease of the probability of a token.
        clip_ratio_high: bound on the increase.
        clip_ratio_c: c, the largest weight.
    """

    def divergence(log_p: torch.Tensor, log_p_old: torch.Tensor) -> torch.Tensor:
        return (log_p.exp() - log_p_old.exp()).abs()

    return _divergence_ppo(
        divergence,
        (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode),
        (clip_ratio_low, clip_ratio_high, clip_ratio_c),
        rollout_is_weights,
    )


@register_policy_loss("dppo_kl")
def dppo_kl(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    clip_ratio_low: float = 0.05,
    clip_ratio_high: float = 0.05,
    clip_ratio_c: float = 20.0,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Divergence PPO with KL (arXiv 2602.04879): `dppo_tv` with another divergence of the sampled token.

    D = KL(Bernoulli(p_old) || Bernoulli(p)): the sampled token against all others
    L = -A stop_gradient(min(rho, c)) log_prob
    dropped where D exceeds high (A > 0, p > p_old) or low (A < 0, p < p_old)
    """

    def divergence(log_p: torch.Tensor, log_p_old: torch.Tensor) -> torch.Tensor:
        log_rest, log_rest_old = log1m_exp(log_p), log1m_exp(log_p_old)
        return log_p_old.exp() * (log_p_old - log_p) + log_rest_old.exp() * (log_rest_old - log_rest)

    def log1m_exp(log_p: torch.Tensor) -> torch.Tensor:
        """log(1 - p), finite at p = 1."""
        return torch.log(-torch.expm1(log_p.clamp(max=-1e-7)))

    return _divergence_ppo(
        divergence,
        (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode),
        (clip_ratio_low, clip_ratio_high, clip_ratio_c),
        rollout_is_weights,
    )


def _divergence_ppo(divergence, columns, bounds, rollout_is_weights) -> LossAndMetrics:
    old_log_prob, log_prob, advantages, mask, loss_agg_mode = columns
    low, high, largest = bounds
    old_log_prob, log_prob, advantages = zero_padding(mask, old_log_prob, log_prob, advantages)
    with torch.no_grad():
        log_ratio = log_prob - old_log_prob
        weight = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=largest)
        moves_further = torch.where(advantages > 0, log_ratio > 0, log_ratio < 0)
        bound = torch.full_like(log_ratio, low).masked_fill(advantages > 0, high)
        dropped = moves_further & (divergence(log_prob, old_log_prob) > bound)
    losses = torch.where(dropped, 0, -advantages * weight * log_prob)
    return weighted_loss(losses, rollout_is_weights, mask, loss_agg_mode, pg_clipfrac=dropped, ppo_kl=-log_ratio)


@register_policy_loss("dro")
def dro(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    dro_beta: float,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Direct reward optimization (Richemond et al. 2024, arXiv 2405.19107): a quadratic penalty instead of the clip.

        L = -(A log_prob - beta / 2 (log_prob - old_log_prob)^2), with beta = dro_beta

    The penalty keeps the policy near the old one also for off-policy data.

    Args:
        dro_beta: strength of the penalty; required.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_prob - old_log_prob
    losses = -(advantages * log_prob - 0.5 * dro_beta * log_ratio**2)
    return weighted_loss(losses, rollout_is_weights, response_mask, loss_agg_mode, ppo_kl=-log_ratio)
