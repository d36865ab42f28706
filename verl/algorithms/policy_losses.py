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
`off_policy_losses`.
"""

from collections.abc import Callable

import torch

from verl.algorithms.masked import agg_loss, mean_parts, zero_padding
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
