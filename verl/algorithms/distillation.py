"""Distillation losses: how far the policy is from a teacher, on responses that the policy has sampled.

On-policy distillation (Agarwal et al. 2023, arXiv 2306.13649; Gu et al. 2023, arXiv 2306.08543). The loss of a token is
an estimate of KL(policy, teacher) from its two log-probs (`kl.kl_penalty`), or KL(teacher, policy) over the tokens that
the teacher finds most probable (`forward_kl_topk`). It is minimized directly, or its negative is the advantage of the
token in a policy loss: with `k1`, that is the policy gradient of KL(policy, teacher).
"""

from collections.abc import Mapping
from typing import Any

import torch

from verl.algorithms.binding import bind_arguments
from verl.algorithms.kl import kl_penalty
from verl.algorithms.masked import LossAggregation, agg_loss, at_least_float32, mean_parts, zero_padding
from verl.algorithms.policy_losses import LossAndMetrics, get_policy_loss_fn

TOP_K = "forward_kl_topk"
"""The loss that reads the log-probs of several tokens per position, of policy and teacher."""


def forward_kl_topk(
    log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, *, log_prob_min_clamp: float | None = None
) -> torch.Tensor:
    """KL(teacher, policy) over the K tokens that the teacher finds most probable.

        sum_k p_k (log p_k - log q_k), at least 0

    p and q are not normalized over the K tokens, so the sum misses the rest of the vocabulary and could be negative.

    Args:
        log_probs: (B, T, K), log q_k of the policy.
        teacher_log_probs: (B, T, K), log p_k.
        log_prob_min_clamp: lower bound of both; a token below has no gradient.

    Returns:
        (B, T) in float32 (or float64).
    """
    policy, teacher = at_least_float32(log_probs), at_least_float32(teacher_log_probs)
    if log_prob_min_clamp is not None:
        policy, teacher = policy.clamp(min=log_prob_min_clamp), teacher.clamp(min=log_prob_min_clamp)
    return (teacher.exp() * (teacher - policy)).sum(-1).clamp(min=0)


def distillation_loss(
    outputs: Mapping[str, torch.Tensor],
    columns: Mapping[str, torch.Tensor],
    old_log_prob: torch.Tensor,
    agg: LossAggregation,
    settings: Mapping[str, Any],
) -> LossAndMetrics:
    """The aggregated distillation loss of one micro-batch, without its coefficient.

    Args:
        outputs: log_probs (b, T) of the policy, and with `forward_kl_topk` candidate_log_probs (b, T, K).
        columns: response_mask and teacher_log_probs (b, T), and teacher_candidate_log_probs (b, T, K).
        old_log_prob: (b, T), for the policy loss of use_policy_gradient.
        agg: counts of the whole mini-batch.
        settings: the section `distillation.distillation_loss`.
    """
    mask, loss_mode = columns["response_mask"], settings["loss_mode"]
    log_prob, teacher = zero_padding(mask, outputs["log_probs"], columns["teacher_log_probs"])
    metrics = {"distillation/reverse_kl": mean_parts(log_prob - teacher, mask)}
    if loss_mode == TOP_K:
        pair = outputs["candidate_log_probs"], columns["teacher_candidate_log_probs"]
        policy, candidates = (torch.where(mask.bool()[..., None], x, 0) for x in pair)
        losses = forward_kl_topk(policy, candidates, log_prob_min_clamp=settings["log_prob_min_clamp"])
        metrics["distillation/student_mass"] = mean_parts(policy.exp().sum(-1), mask)
        metrics["distillation/teacher_mass"] = mean_parts(candidates.exp().sum(-1), mask)
    else:
        losses = kl_penalty(log_prob, teacher, loss_mode)
    (losses,) = zero_padding(mask, losses)
    metrics["distillation/abs_loss"] = mean_parts(losses.abs(), mask)
    if settings["loss_max_clamp"] is not None:
        losses = losses.clamp(-settings["loss_max_clamp"], settings["loss_max_clamp"])
    if not settings["use_policy_gradient"]:
        return agg_loss(losses, mask, agg), metrics
    policy_loss = get_policy_loss_fn(settings["policy_loss_mode"])
    arguments = {**columns, "advantages": -losses.detach(), "loss_agg_mode": agg}
    arguments |= {"old_log_prob": old_log_prob, "log_prob": outputs["log_probs"]}
    loss, further = policy_loss(**bind_arguments(policy_loss, arguments, settings))
    return loss, metrics | {name.replace("actor/", "distillation/"): value for name, value in further.items()}
