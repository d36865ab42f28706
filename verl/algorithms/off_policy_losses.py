"""Policy losses for data that another policy sampled: stale weights, or a sampler that computes differently.

`old_log_prob` is pi_old of the ratio; where it is the sampler's own log-prob (bypass mode) there are two policies, else
three: the sampler's, the trainer's before the update, the current one.
"""

import torch

from verl.algorithms.masked import agg_loss, mean_parts, zero_padding
from verl.algorithms.policy_losses import MAX_LOG_RATIO, LossAndMetrics, register_policy_loss, vanilla, weigh
from verl.algorithms.rollout_correction import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    mismatch,
)
from verl.registry import did_you_mean


@register_policy_loss("reinforce")
def reinforce(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    *,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Policy gradient with importance weights (Williams 1992): -w A log_prob; w, `rollout_is_weights`, is constant."""
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    losses = weigh(-advantages * log_prob, rollout_is_weights, response_mask)
    metrics = {"actor/ppo_kl": mean_parts(old_log_prob - log_prob, response_mask)}
    return agg_loss(losses, response_mask, loss_agg_mode), metrics


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
    """Decoupled PPO (Hilton et al. 2021, arXiv 2110.00641; AReaL, Fu et al. 2025, arXiv 2505.24298).

    (pi_prox / pi_behav) * the clipped surrogate of u = pi / pi_prox: the clip is around a recent policy, the weight,
    constant and truncated, leads back to the one that sampled.

    old_log_prob: of the proximal policy; rollout_log_probs: of the behaviour policy, (B, T)
    rollout_is_threshold: the bound of the weight. It takes the place of `rollout_is_weights`, which would count twice.
    """
    x = mismatch(old_log_prob.detach(), rollout_log_probs, response_mask)
    weights, _ = compute_rollout_correction_weights(x, response_mask, "token", rollout_is_threshold)
    loss, metrics = vanilla(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        clip_ratio=clip_ratio,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
        rollout_is_weights=weights,
    )
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
    """Two policies: `old_log_prob` is the sampler's, and everything is corrected against the current policy.

    loss_type "ppo_clip": `vanilla`, whose ratio is the importance ratio already, so that no weight is multiplied in.
    loss_type "reinforce": `reinforce` with the weights of `rollout_is`, from the current log-probs.
    Rejection (`rollout_rs`) takes tokens out of the loss; the counts of the aggregation stay those of `response_mask`.
    """
    if loss_type not in ("ppo_clip", "reinforce"):
        raise ValueError(
            f"no loss_type is called {loss_type!r}: {did_you_mean(str(loss_type), ('ppo_clip', 'reinforce'))}"
        )
    if rollout_is_batch_normalize:
        raise ValueError(
            "rollout_is_batch_normalize needs the weights of the whole batch, but bypass_mode makes them one "
            "micro-batch at a time: set it to false, or bypass_mode=false"
        )
    x = mismatch(log_prob.detach(), old_log_prob, response_mask)
    weights, metrics = torch.ones_like(x), {}
    if loss_type == "reinforce" and rollout_is is not None:
        weights, metrics = compute_rollout_correction_weights(x, response_mask, rollout_is, rollout_is_threshold)
    if rollout_rs is not None:
        kept, rejected = compute_rollout_rejection_mask(x, response_mask, rollout_rs, rollout_rs_threshold)
        weights, metrics = weights * kept, metrics | rejected
    columns = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode)
    if loss_type == "reinforce":
        loss, found = reinforce(*columns, rollout_is_weights=weights)
    else:
        clip = {"clip_ratio": clip_ratio, "clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high}
        loss, found = vanilla(*columns, **clip, clip_ratio_c=clip_ratio_c, rollout_is_weights=weights)
    return loss, metrics | found


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
    """Divergence PPO, total variation (arXiv 2602.04879): -A min(rho, c) log_prob on the tokens that may still move.

    A token is dropped when its probability has moved by more than the bound *in the direction it is pushed*:
    p - p_old > high where A > 0, p_old - p > low where A < 0. Unlike a ratio, the difference is small for rare tokens.

    clip_ratio_low, clip_ratio_high: bounds on the change of probability; clip_ratio_c: the largest weight
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
    """`dppo_tv` with the divergence KL(Bernoulli(p_old) || Bernoulli(p)): the sampled token against all others."""

    def divergence(log_p: torch.Tensor, log_p_old: torch.Tensor) -> torch.Tensor:
        rest, rest_old = log_of_rest(log_p), log_of_rest(log_p_old)
        return log_p_old.exp() * (log_p_old - log_p) + rest_old.exp() * (rest_old - rest)

    def log_of_rest(log_p: torch.Tensor) -> torch.Tensor:
        """log(1 - p), finite for p = 1."""
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
        pushed_on = torch.where(advantages > 0, log_ratio > 0, log_ratio < 0)
        bound = torch.full_like(log_ratio, low).masked_fill(advantages > 0, high)
        dropped = pushed_on & (divergence(log_prob, old_log_prob) > bound)
    losses = torch.where(dropped, 0, -advantages * weight * log_prob)
    metrics = {
        "actor/pg_clipfrac": mean_parts(dropped, mask),
        "actor/ppo_kl": mean_parts(-log_ratio, mask),
    }
    return agg_loss(weigh(losses, rollout_is_weights, mask), mask, loss_agg_mode), metrics


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
    """Direct reward optimisation (Richemond et al. 2024, arXiv 2405.19107).

    -(A log_prob - beta / 2 (log_prob - old_log_prob)^2)

    dro_beta: strength of the pull towards the old policy; there is no default
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_prob - old_log_prob
    losses = -(advantages * log_prob - 0.5 * dro_beta * log_ratio**2)
    metrics = {"actor/ppo_kl": mean_parts(-log_ratio, response_mask)}
    return agg_loss(weigh(losses, rollout_is_weights, response_mask), response_mask, loss_agg_mode), metrics
