"""Advantage estimators with a variance-optimal baseline per token.

The variance of a policy gradient is smallest if the baseline at step t is the mean of the returns, weighted by the
squared norm of the gradient that each response has accumulated up to t. For a softmax, up to the features of the last
layer, that norm is W_t = sum_(j <= t) (1 - 2 pi_j + sum_v pi_jv^2). It is cheap and known before the backward pass.
"""

from collections.abc import Sequence

import torch

from verl.algorithms.advantages import GroupedRewards, register_adv_est, rewards_to_go
from verl.algorithms.masked import checked_column


@register_adv_est("optimal_token_baseline", min_group_size=2)
@torch.no_grad()
def optimal_token_baseline(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Optimal token baseline: the returns of the prompt's responses at step t, weighted by gradient energy.

        A_t = G_t - B_t,  B_t = sum_i G_it W_it / (sum_i W_it + epsilon), over the responses i of the prompt

    G is the reward to go and W the accumulated gradient energy (see the module docstring). Returns are G. Assumes that
    step t of the responses can be compared, that is, single-turn responses.

    Args:
        old_log_probs: (B, T).
        sum_pi_squared: (B, T), sum_v pi_v^2 of the distribution that each token was sampled from.
        rollout_is_weights: (B, T), importance weights; the energy of a step is multiplied by their square.
        handle_zero_tail: beyond the end of all other responses, the baseline of the longest one would be its own return
            and its advantage 0. True uses a baseline of 0 there.
    """
    grouped = GroupedRewards("optimal_token_baseline", token_level_rewards, response_mask, uid)
    columns = _columns(grouped, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _advantages(grouped, *columns, handle_zero_tail, epsilon)


@register_adv_est("tir_optimal_token_baseline", min_group_size=2)
@torch.no_grad()
def tir_optimal_token_baseline(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`optimal_token_baseline` for tool-integrated reasoning: step t is the t-th token of the policy.

    Tool output would shift the steps of the responses against each other. So the tokens of the policy are moved to the
    front of each response, and the result is moved back to their positions. Arguments as in `optimal_token_baseline`.
    """
    grouped = GroupedRewards("tir_optimal_token_baseline", token_level_rewards, response_mask, uid)
    columns = _columns(grouped, old_log_probs, sum_pi_squared, rollout_is_weights)
    order = torch.argsort(~grouped.mask, dim=-1, stable=True)  # (B, T) the policy's tokens first
    compacted = (x.gather(-1, order) for x in columns)
    advantages, returns = _advantages(grouped, *compacted, handle_zero_tail, epsilon)
    inverse = torch.argsort(order, dim=-1)
    return advantages.gather(-1, inverse), returns.gather(-1, inverse)


def _columns(
    grouped: GroupedRewards, old_log_probs: torch.Tensor, sum_pi_squared: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Return rewards, mask and gradient energy of each token, (B, T)."""
    mask = grouped.mask
    old_log_probs = checked_column("old_log_probs", old_log_probs, mask)
    energy = 1 - 2 * old_log_probs.exp() + checked_column("sum_pi_squared", sum_pi_squared, mask)
    if weights is not None:
        energy = energy * checked_column("rollout_is_weights", weights, mask) ** 2
    return grouped.token_level_rewards, mask, energy


def _advantages(
    grouped: GroupedRewards,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    energy: torch.Tensor,
    handle_zero_tail: bool,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    returns = rewards_to_go(rewards, mask)
    accumulated = torch.where(mask, torch.where(mask, energy, 0).cumsum(-1), 0)  # W_t, (B, T)
    baseline = grouped.groups.sum(returns * accumulated) / (grouped.groups.sum(accumulated) + epsilon)
    if handle_zero_tail:
        baseline = torch.where(grouped.groups.sum(mask.long()) == 1, 0, baseline)
    compared = mask & grouped.comparable.unsqueeze(-1)
    return torch.where(compared, returns - baseline, 0), returns
