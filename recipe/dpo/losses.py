"""The mathematics of DPO and IPO: pairs of responses, and their losses.

A sequence log-prob is the sum over the response (`sequence_log_prob`), (N,) for N pairs. Losses are means over pairs.
`num_pairs` is the number of pairs of the whole mini-batch; pass it if a call sees a micro-batch, so that the losses of
the micro-batches sum to that of the mini-batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from verl.algorithms.masked import Groups, at_least_float32, mean_over, mean_parts, zero_padding
from verl.algorithms.policy_losses import LossAndMetrics
from verl.registry import did_you_mean


def sequence_log_prob(log_probs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Sum of the token log-probs of each response: (B, T) -> (B,)."""
    return zero_padding(response_mask, log_probs)[0].sum(-1)


def dpo_loss(
    chosen_log_prob: torch.Tensor,
    rejected_log_prob: torch.Tensor,
    ref_chosen_log_prob: torch.Tensor,
    ref_rejected_log_prob: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    num_pairs: int | None = None,
) -> LossAndMetrics:
    """Direct preference optimization: increase the margin of the chosen over the rejected response.

    With h = (chosen - rejected) - (ref_chosen - ref_rejected), of sequence log-probs (N,):

        sigmoid: -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)   Rafailov et al. 2023, arXiv 2305.18290
        ipo:     (h - 1 / (2 beta))^2                                     Azar et al. 2023, arXiv 2310.12036

    sigmoid assumes Bradley-Terry preferences, ipo does not.

    Args:
        beta: strength of the KL constraint to the reference policy.
        label_smoothing: s, the assumed fraction of flipped labels.
        num_pairs: pairs of the whole mini-batch; N by default.

    Raises:
        ValueError: if `loss_type` is unknown.
    """
    chosen = chosen_log_prob - ref_chosen_log_prob
    rejected = rejected_log_prob - ref_rejected_log_prob
    h = chosen - rejected
    if loss_type == "sigmoid":
        losses = -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)
    elif loss_type == "ipo":
        losses = (h - 1 / (2 * beta)) ** 2
    else:
        raise ValueError(f"no DPO loss is called {loss_type!r}: {did_you_mean(str(loss_type), ('sigmoid', 'ipo'))}")
    ones = torch.ones_like(h)
    metrics = {
        "dpo/accuracy": mean_parts(h > 0, ones),
        "dpo/margin": mean_parts(beta * h, ones),
        "dpo/reward_chosen": mean_parts(beta * chosen, ones),
        "dpo/reward_rejected": mean_parts(beta * rejected, ones),
    }
    return mean_over(losses, num_pairs), metrics


class PreferencePairs(NamedTuple):
    """Indices of the chosen and the rejected response of each pair, and the number of zero-variance groups."""

    chosen: torch.Tensor  # (N,) long
    rejected: torch.Tensor  # (N,) long
    num_ties: int


def select_pairs(rewards: torch.Tensor, uid: Sequence) -> PreferencePairs:
    """Online DPO: pair the best and the worst response of each prompt, in order of first appearance.

    A zero-variance group gives no pair and is counted in `num_ties`. Among equal rewards the first response is taken.

    Args:
        rewards: (B,) reward of each response.
        uid: (B,) identifies the prompt of each sample.

    Raises:
        ValueError: if a reward is NaN.
    """
    if torch.isnan(rewards).any():
        raise ValueError(
            f"rewards: expected finite numbers, found NaN in rows {torch.isnan(rewards).nonzero().flatten().tolist()}"
        )
    rewards = at_least_float32(rewards)
    rows = torch.arange(len(rewards), device=rewards.device)
    groups = Groups(uid, torch.ones_like(rows, dtype=torch.bool))

    def first(is_extreme: torch.Tensor) -> torch.Tensor:
        """For each sample, the index of the first extreme one of its group."""
        return (-groups.max(torch.where(is_extreme, -rows.double(), -torch.inf))).long()

    best, worst = groups.max(rewards), -groups.max(-rewards)
    leads = rows == first(torch.ones_like(rows, dtype=torch.bool))  # one sample per group
    differs = leads & (best > worst)
    return PreferencePairs(
        chosen=first(rewards == best)[differs],
        rejected=first(rewards == worst)[differs],
        num_ties=int(leads.sum() - differs.sum()),
    )
