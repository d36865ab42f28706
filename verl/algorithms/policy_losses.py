"""Policy losses: what the actor minimises, given an advantage for each token.

    @register_policy_loss("mine")
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, *, clip_ratio=0.2,
             rollout_is_weights=None):
        ...
        return loss, {"actor/my_metric": mean_parts(x, response_mask)}

The first four are (B, T); rho = exp(log_prob - old_log_prob) is the ratio of the current to the old policy.
`loss_agg_mode` is a mode name or the `LossAggregation` of the mini-batch, and goes on to `agg_loss`. Keyword-only
parameters are settings of the actor by the same name; their defaults are the published ones. `rollout_is_weights`
(B, T) multiplies the loss of each token before the aggregation, whose counts stay as they are.

The result is the scalar loss and metrics: name -> (sum, count) or float. Losses for data from another policy are in
`off_policy_losses`, those that choose tokens by covariance in `covariance_losses`, SPPO in `preference`.
"""

from collections.abc import Callable

import torch

from verl.algorithms.masked import agg_loss, force_mode, masked_mean, mean_parts, zero_padding
from verl.registry import Registry

POLICY_LOSS_REGISTRY: Registry[Callable] = Registry("policy loss")

LossAndMetrics = tuple[torch.Tensor, dict[str, object]]

# exp(20) is far beyond any clip range, yet its square is finite in float32.
MAX_LOG_RATIO = 20.0


def register_policy_loss(name: str) -> Callable[[Callable], Callable]:
    """Decorator that registers a policy loss."""
    return lambda fn: POLICY_LOSS_REGISTRY.register(name, fn)


def get_policy_loss_fn(name: str) -> Callable:
    """The policy loss registered under `name`. Raises ValueError that lists the names."""
    return POLICY_LOSS_REGISTRY[name]


def clip_range(clip_ratio: float, clip_ratio_low: float | None, clip_ratio_high: float | None) -> tuple[float, float]:
    """The distances of the clip bounds below and above 1; where one is not given it is `clip_ratio`."""
    return (
        clip_ratio if clip_ratio_low is None else clip_ratio_low,
        clip_ratio if clip_ratio_high is None else clip_ratio_high,
    )


def weigh(losses: torch.Tensor, weights: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """Token losses times the importance weights of the rollout, which are constants, if there are any."""
    return losses if weights is None else losses * zero_padding(mask, weights.detach())[0]


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
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347) with dual clip (Ye et al. 2019).

    max(-A rho, -A clip(rho, 1 - low, 1 + high)); where A < 0 at most -A c, so that one token with a huge ratio cannot
    dominate (arXiv 1912.09729). `clip_ratio_high > clip_ratio_low` is clip-higher (DAPO, arXiv 2503.14476).

    clip_ratio: both bounds; `clip_ratio_low` and `clip_ratio_high` take precedence
    clip_ratio_c: the c of the dual clip, above 1
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
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

    metrics = {
        "actor/pg_clipfrac": mean_parts(clipped > unclipped, response_mask),
        "actor/pg_clipfrac_lower": mean_parts((surrogate > bound) & (advantages < 0), response_mask),
        "actor/ppo_kl": mean_parts(-log_ratio, response_mask),
    }
    return agg_loss(weigh(losses, rollout_is_weights, response_mask), response_mask, loss_agg_mode), metrics


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
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071): one ratio per response.

    s_i = exp(mean_t(log_prob - old_log_prob)), clipped as in PPO: a response keeps its gradient as a whole or loses it.
    The ratio is normalised by length, so the clip range is some thousand times narrower than for tokens. The mode is
    always the mean over responses of their token mean. The log-ratio is bounded above by 10.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_prob - old_log_prob
    sequence_log_ratio = masked_mean(log_ratio, response_mask, -1).unsqueeze(-1)  # (B, 1)
    # The value of s_i at every token, the gradient through the token's own log-prob: advantages may differ by token.
    ratio = (log_prob - log_prob.detach() + sequence_log_ratio.detach()).clamp(max=10.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = weigh(torch.maximum(unclipped, clipped), rollout_is_weights, response_mask)
    metrics = {
        "actor/pg_clipfrac": mean_parts(clipped > unclipped, response_mask),
        "actor/ppo_kl": mean_parts(-log_ratio, response_mask),
    }
    return agg_loss(losses, response_mask, force_mode(loss_agg_mode, "seq-mean-token-mean")), metrics


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
    """Geometric-mean policy optimisation, GMPO (Zhao et al. 2025, arXiv 2507.20673).

    x_t = log_prob - old_log_prob, clipped to [-low, high] on the side to which the advantage pushes;
    s_i = exp(mean_t x_t), loss_i = -mean_t(A) s_i. The geometric mean is less moved by a single token than PPO's
    arithmetic mean. The mode is always the mean over (non-empty) responses; importance weights enter by their mean.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sign = advantages.sign()
    within = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    clipped = sign * torch.minimum(sign * log_ratio, sign * within)
    ratio = masked_mean(clipped, response_mask, -1).exp()  # (B,)
    losses = -masked_mean(advantages, response_mask, -1) * ratio
    losses = weigh(losses.unsqueeze(-1).expand_as(log_ratio), rollout_is_weights, response_mask)
    metrics = {
        "actor/pg_clipfrac": mean_parts(clipped != log_ratio * sign.abs(), response_mask),
        "actor/ppo_kl": mean_parts(-log_ratio, response_mask),
    }
    return agg_loss(losses, response_mask, force_mode(loss_agg_mode, "seq-mean-token-mean")), metrics


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
    """Clipped IS-weight policy optimisation (MiniMax 2025, arXiv 2506.13585): -sg(clip(rho)) A log_prob.

    The clipped ratio is a constant weight, so that every token keeps a gradient. The paper has no lower bound: a low of
    1 or more is none. Only the gradient of the loss means something, not its value.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = weigh(-weight * advantages * log_prob, rollout_is_weights, response_mask)
    metrics = {
        "actor/pg_clipfrac": mean_parts(weight != ratio, response_mask),
        "actor/ppo_kl": mean_parts(-log_ratio, response_mask),
    }
    return agg_loss(losses, response_mask, loss_agg_mode), metrics


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
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv 2511.20347): -A (4 / tau) sigmoid(tau (rho - 1)).

    A smooth gate in place of the clip: its slope is 1 at rho = 1 and fades with the distance, faster for a larger tau.
    tau is `tau_pos` where A > 0, else `tau_neg`. The mode is always the mean over responses of their token mean.
    """
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
    losses = weigh(-advantages * gate, rollout_is_weights, response_mask)
    metrics = {"actor/ppo_kl": mean_parts(-log_ratio, response_mask)}
    return agg_loss(losses, response_mask, force_mode(loss_agg_mode, "seq-mean-token-mean")), metrics


@register_policy_loss("gpg")
def gpg(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    rollout_is_weights: torch.Tensor | None = None,
) -> LossAndMetrics:
    """Group policy gradient (Chu et al. 2025, arXiv 2504.02546): -A log_prob. On-policy: one update per batch."""
    old_log_prob, log_prob, advantages = zero_padding(response_mask, old_log_prob, log_prob, advantages)
    losses = weigh(-advantages * log_prob, rollout_is_weights, response_mask)
    metrics = {"actor/ppo_kl": mean_parts(old_log_prob - log_prob, response_mask)}
    return agg_loss(losses, response_mask, loss_agg_mode), metrics
