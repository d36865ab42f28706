"""Policy losses: what the actor minimizes, given an advantage per token.

    @register_policy_loss("mine")
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, *, clip_ratio=0.2,
             rollout_is_weights=None):
        ...
        return loss, {"actor/my_metric": mean_parts(x, response_mask)}

The first four arguments are (B, T); rho = exp(log_prob - old_log_prob) is the ratio of the current to the old policy.
`loss_agg_mode` is a mode name or the `LossAggregation` of the mini-batch, and is passed to `agg_loss`. Keyword-only
parameters are settings of the actor with the same name; the defaults are the published values. `rollout_is_weights`
(B, T) multiplies the token losses before the aggregation and does not change its counts.

A loss returns a scalar and metrics: name -> (sum, count) or float. Losses for off-policy data are in
`off_policy_losses`, SPPO in `preference`.
"""

from collections.abc import Callable, Iterable

import torch

from verl.algorithms.masked import agg_loss, force_mode, masked_mean, mean_parts, zero_padding
from verl.registry import Registry

LossAndMetrics = tuple[torch.Tensor, dict[str, object]]
PolicyLossFn = Callable[..., LossAndMetrics]

POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry("policy loss")

#: policy losses that are defined for seq-mean-token-mean only and ignore another `loss_agg_mode`
FIXED_AGG_MODE = ("geo_mean", "sapo", "sppo")

# exp(20) is far outside any clip range, and its square is still finite in float32
MAX_LOG_RATIO = 20.0


def register_policy_loss(name: str) -> Callable[[Callable], Callable]:
    """Decorator that registers a policy loss."""
    return lambda fn: POLICY_LOSS_REGISTRY.register(name, fn)


def get_policy_loss_fn(name: str) -> Callable:
    """Return the policy loss registered under `name`. Raises ValueError with the known names."""
    return POLICY_LOSS_REGISTRY[name]


def clip_range(clip_ratio: float, clip_ratio_low: float | None, clip_ratio_high: float | None) -> tuple[float, float]:
    """Return the distances of the clip bounds below and above 1; each defaults to `clip_ratio`."""
    return (
        clip_ratio if clip_ratio_low is None else clip_ratio_low,
        clip_ratio if clip_ratio_high is None else clip_ratio_high,
    )


def apply_weights(losses: torch.Tensor, weights: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """Multiply token losses by the importance weights, which are treated as constants; None: unchanged."""
    return losses if weights is None else losses * zero_padding(mask, weights.detach())[0]


def weighted_loss(
    losses: torch.Tensor, weights: torch.Tensor | None, mask: torch.Tensor, loss_agg_mode: str, **metrics: torch.Tensor
) -> LossAndMetrics:
    """Return the aggregated token losses (B, T) after `apply_weights`, and `metrics` (B, T) as `actor/<name>`."""
    loss = agg_loss(apply_weights(losses, weights, mask), mask, loss_agg_mode)
    return loss, {f"actor/{name}": mean_parts(value, mask) for name, value in metrics.items()}


def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float = 0.2,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347) with dual clip (arXiv 1912.09729).

        L = max(-A rho, -A clip(rho, 1 - low, 1 + high));  where A < 0, at most -A c

    The clip removes the gradient of a token whose ratio has moved past the bound in the direction of its advantage. The
    dual clip limits the loss of a single token with a large ratio. `cliprange_high > cliprange_low` is clip-higher
    (DAPO, arXiv 2503.14476). Assumes that `old_log_prob` is that of the sampling policy or close to it.

    Training calls this function for the loss `vanilla`, so editing or replacing it changes the training.

    Args:
        cliprange: both bounds; `cliprange_low` and `cliprange_high` take precedence.
        clip_ratio_c: c of the dual clip, above 1.

    Returns:
        The loss, the clipped fraction, the KL to the old policy, and the fraction that the dual clip bounds.
    """
    low, high = clip_range(cliprange, cliprange_low, cliprange_high)
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c: expected a number above 1 (a bound on the ratio), found {clip_ratio_c}")
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    surrogate = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(surrogate, bound), surrogate)
    losses = apply_weights(losses, rollout_is_weights, response_mask)

    reported = (clipped > unclipped, -log_ratio, (surrogate > bound) & (advantages < 0))
    means = (masked_mean(x.detach().double(), response_mask) for x in reported)
    return agg_loss(losses, response_mask, loss_agg_mode), *means


@register_policy_loss("vanilla")
def vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """PPO: `compute_policy_loss`."""
    columns, clip = (old_log_prob, log_prob, advantages, response_mask), (clip_ratio, clip_ratio_low, clip_ratio_high)
    loss, *means = compute_policy_loss(*columns, *clip, clip_ratio_c, loss_agg_mode, rollout_is_weights)
    return loss, as_parts(CLIP_METRICS, means, response_mask)


CLIP_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
"""Metrics that `compute_policy_loss` returns after the loss."""


def as_parts(names: Iterable[str], means: Iterable[torch.Tensor], mask: torch.Tensor) -> dict[str, object]:
    """Return means over the tokens of `mask` as metrics (sum, count)."""
    tokens = mask.bool().sum()
    return {name: (mean.detach() * tokens, tokens) for name, mean in zip(names, means)}


@register_policy_loss("gspo")
def gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071): one ratio per response.

        s_i = exp(mean_t(log_prob - old_log_prob));  L = max(-A s, -A clip(s, 1 - low, 1 + high))

    A response is clipped as a whole. The ratio is normalized by length, so the clip range is about a thousand times
    narrower than for token ratios. Assumes one advantage per response (advantages may still differ by token).
    The paper takes the mean over responses of their token mean, the default. The log-ratio is at most 10.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_prob - old_log_prob
    sequence_log_ratio = masked_mean(log_ratio, response_mask, -1).unsqueeze(-1)  # (B, 1)
    # value s_i at every token, gradient through the log-prob of the token: advantages may differ by token
    ratio = (log_prob - log_prob.detach() + sequence_log_ratio.detach()).clamp(max=10.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses, metrics = torch.maximum(unclipped, clipped), {"pg_clipfrac": clipped > unclipped, "ppo_kl": -log_ratio}
    return weighted_loss(losses, rollout_is_weights, response_mask, loss_agg_mode, **metrics)


@register_policy_loss("geo_mean")
def geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    *,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Geometric-mean policy optimization, GMPO (Zhao et al. 2025, arXiv 2507.20673).

        x_t = log_prob - old_log_prob, clipped to [-low, high] in the direction of the advantage
        L_i = -mean_t(A) exp(mean_t x_t)

    A geometric mean of token ratios is less sensitive to a single token than PPO's arithmetic mean. `loss_agg_mode` is
    ignored: always the mean over non-empty responses. Importance weights enter by their mean per response.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sign = advantages.sign()
    within = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    clipped = sign * torch.minimum(sign * log_ratio, sign * within)
    ratio = masked_mean(clipped, response_mask, -1).exp()  # (B,)
    losses = (-masked_mean(advantages, response_mask, -1) * ratio).unsqueeze(-1).expand_as(log_ratio)
    mode, metrics = force_mode(loss_agg_mode, "seq-mean-token-mean"), {"pg_clipfrac": clipped != log_ratio * sign.abs()}
    return weighted_loss(losses, rollout_is_weights, response_mask, mode, **metrics, ppo_kl=-log_ratio)


@register_policy_loss("cispo")
def cispo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    clip_ratio_low: float = 10.0,
    clip_ratio_high: float = 0.2,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Clipped importance-sampling weights, CISPO (MiniMax 2025, arXiv 2506.13585).

        L = -stop_gradient(clip(rho, 1 - low, 1 + high)) A log_prob

    The clipped ratio is a constant weight, so every token keeps its gradient. The paper has no lower bound;
    `clip_ratio_low` of 1 or more disables it. The value of the loss has no meaning, only its gradient.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses, metrics = -weight * advantages * log_prob, {"pg_clipfrac": weight != ratio, "ppo_kl": -log_ratio}
    return weighted_loss(losses, rollout_is_weights, response_mask, loss_agg_mode, **metrics)


@register_policy_loss("sapo")
def sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Soft adaptive policy optimization (Gao et al. 2025, arXiv 2511.20347): a smooth gate instead of the clip.

        L = -A (4 / tau) sigmoid(tau (rho - 1)), with tau = tau_pos where A > 0, otherwise tau_neg

    The slope in rho is 1 at rho = 1 and decays with the distance, faster for a larger tau. `loss_agg_mode` is ignored:
    always the mean over responses of their token mean.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
    mode = force_mode(loss_agg_mode, "seq-mean-token-mean")
    return weighted_loss(-advantages * gate, rollout_is_weights, response_mask, mode, ppo_kl=-log_ratio)


@register_policy_loss("reinforce")
@register_policy_loss("gpg")
def reinforce(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """REINFORCE (Williams 1992) with importance weights: the plain policy gradient, without ratio and clip.

        L = -w A log_prob, with the constant w = rollout_is_weights, or 1

    Assumes one update per batch, or weights that account for the difference. Group policy gradient (`gpg`, Chu et al.
    2025, arXiv 2504.02546) has the same loss.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    ppo_kl = old_log_prob - log_prob
    return weighted_loss(-advantages * log_prob, rollout_is_weights, response_mask, loss_agg_mode, ppo_kl=ppo_kl)


# ---------------------------------------------------------------------------------------------------- Clip-Cov, KL-Cov
#
# Cui et al. 2025, "The entropy mechanism", arXiv 2505.22617. The entropy decreases with the covariance of log-prob and
# advantage, cov_t = (A_t - mean A)(log_prob_t - mean log_prob), and a few tokens contribute most of it. Clip-Cov drops
# the gradient of some of these tokens, KL-Cov adds a KL penalty on them.
#
# Means and selection are over the tokens of one call. With gradient accumulation, each micro-batch selects among its
# own tokens, at least one. So the gradient of these two losses, unlike all others, depends on the micro-batch size;
# trainers warn about it. To select over the mini-batch as in the paper, use one micro-batch per mini-batch.

SELECTS_PER_MICRO_BATCH = ("clip_cov", "kl_cov")
"""Policy losses whose gradient depends on how the mini-batch is split."""


def _covariance(advantages: torch.Tensor, log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return cov_t, (B, T), without gradient; -inf outside the mask, so that padding is never selected."""
    log_prob = log_prob.detach()
    covariance = (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))
    return torch.where(mask.bool(), covariance, -torch.inf)


def _num_selected(fraction: float, mask: torch.Tensor) -> int:
    """Number of tokens to select: at least one, if there are any."""
    tokens = int(mask.bool().sum())
    return min(tokens, max(1, int(fraction * tokens)))


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
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617): PPO, with a few random tokens of high covariance dropped.

        L = 0 on the dropped tokens, otherwise max(-A rho, -A clip(rho, 1 - low, 1 + high))

    Tokens whose log-prob and advantage are high together reduce the entropy most. Selects per micro-batch (see above).

    Args:
        clip_cov_ratio: fraction of tokens to drop.
        clip_cov_lb: lower bound of the covariance of a token that may be dropped.
        clip_cov_ub: upper bound. Tokens that PPO clips are not dropped.
        generator: random numbers of the selection; torch's global generator if None.
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
    selected = candidates[order[: _num_selected(clip_cov_ratio, response_mask)]]
    dropped = torch.zeros_like(covariance, dtype=torch.bool)
    dropped.view(-1)[selected] = True

    losses, metrics = torch.where(dropped, 0, torch.maximum(unclipped, clipped)), {"pg_clipfrac": dropped}
    return weighted_loss(losses, rollout_is_weights, response_mask, loss_agg_mode, **metrics, ppo_kl=-log_ratio)


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
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): no clip, a KL penalty on the tokens of highest covariance.

        L = -A rho + ppo_kl_coef |log_prob - old_log_prob| on the selected tokens, -A rho on the others

    Selects per micro-batch (see above).

    Args:
        kl_cov_ratio: fraction of tokens with the penalty.
        ppo_kl_coef: weight of the penalty.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    covariance = _covariance(advantages, log_prob, response_mask)
    penalized = torch.zeros_like(covariance, dtype=torch.bool)
    penalized.view(-1)[covariance.flatten().topk(_num_selected(kl_cov_ratio, response_mask)).indices] = True

    losses = -advantages * log_ratio.exp() + torch.where(penalized, ppo_kl_coef * log_ratio.abs(), 0)
    metrics = {"kl_cov_fraction": penalized, "ppo_kl": -log_ratio}
    return weighted_loss(losses, rollout_is_weights, response_mask, loss_agg_mode, **metrics)
