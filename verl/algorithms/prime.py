"""PRIME (Cui et al. 2025, arXiv 2502.01456): token-level rewards from outcome labels alone.

An implicit process reward model phi starts as a copy of the policy. It is trained on outcomes to classify responses as
correct by the sum over tokens of beta * (log phi - log ref). Each term of the sum is then the reward of its token.

    q = phi_log_prob - ref_log_prob                                        # (B, T)
    loss, metrics = prime_loss(q, acc, response_mask)                      # trains phi
    rm_scores = implicit_process_rewards(q, response_mask)                 # a column of the estimator
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
    """Return the process rewards beta * (log phi - log ref), (B, T); 0 at the last token, which has the outcome reward.

    Args:
        log_ratio: (B, T), log phi - log ref.
        batch_norm: divide by the largest absolute reward to go of the batch, so that the scale does not drift with phi.
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
    """Binary cross-entropy of sigmoid(beta sum_t log_ratio_t) against the outcome, mean over responses.

    Args:
        log_ratio: (B, T), log phi - log ref.
        acc: (B,) outcomes in [0, 1].
        num_sequences: responses of the whole mini-batch, if this call sees a micro-batch.
    """
    (log_ratio,) = zero_padding(response_mask, log_ratio)
    logit = beta * log_ratio.sum(-1)
    acc = acc.to(logit)
    losses = binary_cross_entropy_with_logits(logit, acc, reduction="none")
    ones = torch.ones_like(acc)
    metrics = {"prm/loss": mean_parts(losses, ones), "prm/acc": mean_parts((logit > 0) == (acc > 0.5), ones)}
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
    """PRIME (arXiv 2502.01456): process and outcome rewards, each with a leave-one-out baseline.

        process_t = n / (n - 1) r_t - sum_j mean_t(r_j) / (n - 1)
        outcome   = n / (n - 1) R - sum_j R_j / (n - 1), on the last token
        A = whiten(G), G the rewards to go of reward_dpo_coef * process + reward_gt_coef * outcome

    Returns are G.

    Args:
        token_level_rewards: (B, T), the outcome rewards (minus a KL penalty, if there is one).
        rm_scores: (B, T), the process rewards r.
        reward_dpo_coef: weight of the process rewards.
        reward_gt_coef: weight of the outcome rewards.
    """
    grouped = GroupedRewards("prime", token_level_rewards, response_mask, uid)
    process = checked_column("rm_scores", rm_scores, response_mask).double()
    mask, groups = grouped.mask, grouped.groups
    others = (groups.count - 1).clamp(min=1)  # (B,)

    def leave_one_out(reward: torch.Tensor, mean_reward: torch.Tensor) -> torch.Tensor:
        return reward * (groups.count / others).unsqueeze(-1) - (groups.sum(mean_reward) / others).unsqueeze(-1)

    rewards = reward_dpo_coef * leave_one_out(process, masked_mean(process, mask, -1))
    outcome = leave_one_out(grouped.reward.unsqueeze(-1), grouped.reward)
    rewards = rewards + torch.where(last_token(mask), reward_gt_coef * outcome, 0)
    rewards = torch.where(mask & grouped.comparable.unsqueeze(-1), rewards, 0)
    returns = rewards_to_go(rewards, mask).to(grouped.token_level_rewards.dtype)
    return whiten_comparable(returns, grouped), returns


def last_token(mask: torch.Tensor) -> torch.Tensor:
    """Return a (B, T) bool mask of the last position in each row where `mask` is 1."""
    count = mask.long().cumsum(-1)
    return mask.bool() & (count == count[:, -1:])
