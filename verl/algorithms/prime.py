"""PRIME (Cui et al. 2025, arXiv 2502.01456): rewards for every token from an outcome label alone.

An implicit process reward model phi starts as a copy of the policy and learns, from outcomes, to tell right responses
from wrong ones by beta * (log phi - log ref) summed over the tokens; each summand then serves as that token's reward.

    q = phi_log_prob - ref_log_prob                                        # (B, T)
    loss, metrics = prime_loss(q, acc, response_mask)                      # trains phi
    rm_scores = implicit_process_rewards(q, response_mask)                 # a column, which the estimator asks for
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from verl.algorithms.advantages import GroupedRewards, register_adv_est, rewards_to_go, whiten_comparable
from verl.algorithms.masked import checked_column, masked_mean, mean_over, mean_parts, zero_padding


@torch.no_grad()
def implicit_process_rewards(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, *, beta: float = 0.05, batch_norm: bool = True
) -> torch.Tensor:
    """beta * (log phi - log ref) per token, (B, T); the last token of a response gets none, it has the outcome.

    batch_norm: divide by the largest absolute reward to go of the batch, so that the scale does not drift with phi
    """
    mask = response_mask.bool()
    rewards = beta * checked_column("log_ratio", log_ratio, mask)
    rewards = torch.where(last_token(mask), 0, rewards)
    if batch_norm:
        largest = rewards_to_go(rewards, mask).abs().max()
        rewards = torch.where(largest > 0, rewards / largest, rewards)
    return rewards


def prime_loss(
    log_ratio: torch.Tensor,
    acc: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    beta: float = 0.05,
    num_sequences: int | None = None,
) -> tuple[torch.Tensor, dict[str, object]]:
    """Cross-entropy of sigmoid(beta sum_t log_ratio_t) against the outcome `acc` (B,) in [0, 1], mean over responses.

    num_sequences: the responses of the whole mini-batch, when this is a part of it
    """
    (log_ratio,) = zero_padding(response_mask, log_ratio)
    logit = beta * log_ratio.sum(-1)
    acc = acc.to(logit)
    losses = binary_cross_entropy_with_logits(logit, acc, reduction="none")
    every = torch.ones_like(acc)
    metrics = {"prm/loss": mean_parts(losses, every), "prm/acc": mean_parts((logit > 0) == (acc > 0.5), every)}
    return mean_over(losses, num_sequences), metrics


@register_adv_est("prime", min_group_size=2)
@torch.no_grad()
def prime(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: Sequence,
    rm_scores: torch.Tensor,
    *,
    reward_dpo_coef: float = 5.0,
    reward_gt_coef: float = 5.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Process and outcome rewards, each with a leave-one-out baseline; rewards to go of their sum, whitened.

    process part of each token: n / (n - 1) r_t - sum_j mean_t(r_j) / (n - 1), on the scale of one token's reward
    outcome part, on the last token: n / (n - 1) R - sum_j R_j / (n - 1)

    rm_scores: (B, T), process rewards; token_level_rewards: the outcome (with a KL penalty, if there is one)
    reward_dpo_coef, reward_gt_coef: the weights of the process and of the outcome part
    """
    grouped = GroupedRewards("prime", token_level_rewards, response_mask, uid)
    process = checked_column("rm_scores", rm_scores, response_mask).double()
    mask, groups = grouped.mask, grouped.groups
    others = (groups.count - 1).clamp(min=1)  # (B,)

    def leave_one_out(rewards: torch.Tensor, mean_reward: torch.Tensor) -> torch.Tensor:
        return rewards * (groups.count / others).unsqueeze(-1) - (groups.sum(mean_reward) / others).unsqueeze(-1)

    parts = reward_dpo_coef * leave_one_out(process, masked_mean(process, mask, -1))
    outcome = leave_one_out(grouped.reward.unsqueeze(-1), grouped.reward)
    parts = parts + torch.where(last_token(mask), reward_gt_coef * outcome, 0)
    parts = torch.where(mask & grouped.comparable.unsqueeze(-1), parts, 0)
    returns = rewards_to_go(parts, mask).to(grouped.token_level_rewards.dtype)
    return whiten_comparable(returns, grouped), returns


def last_token(mask: torch.Tensor) -> torch.Tensor:
    """(B, T) bool, true at the last position of each row where the mask is 1."""
    so_far = mask.long().cumsum(-1)
    return mask.bool() & (so_far == so_far[:, -1:])
