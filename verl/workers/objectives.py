"""The objectives that workers pass to engines: policy loss with entropy bonus and KL, value loss, SFT loss.

Every term of an objective is divided by the same counts, those of the whole mini-batch over all ranks, which the
`LossAggregation` carries.
"""

from collections.abc import Mapping
from typing import Any

import torch

from verl.algorithms.binding import bind_arguments
from verl.algorithms.kl import kl_loss, sft_nll, value_loss
from verl.algorithms.masked import LossAggregation, agg_loss, mean_parts, zero_padding
from verl.algorithms.policy_losses import get_policy_loss_fn
from verl.engines.base import Objective, Tensors, TrainEngine
from verl.engines.metrics import Largest


def aggregation(
    mode: str, response_mask: torch.Tensor, engine: TrainEngine, scale_factor: float | None
) -> LossAggregation:
    """The loss aggregation of a mini-batch.

    Args:
        mode: `loss_agg_mode`.
        response_mask: (b, T) of this rank's rows of the mini-batch.
        engine: sums the counts over the ranks.
        scale_factor: divisor of "seq-mean-token-sum-norm"; None for T.
    """
    tokens = response_mask.bool()
    counts = engine.sum_over_ranks([float(tokens.sum()), float(tokens.any(-1).sum())])
    return LossAggregation(mode, *counts, scale_factor=scale_factor or tokens.shape[-1])


def _share(value: torch.Tensor, mask: torch.Tensor, agg: LossAggregation) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch's share of a loss as a metric pair: the counts of all shares of a mini-batch add up to 1."""
    return value.detach(), mask.bool().any(-1).sum() / max(agg.num_sequences, 1)


def policy_objective(
    loss_mode: str, settings: Mapping[str, Any], agg: LossAggregation, old_is_current: bool = False
) -> Objective:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference).

    Args:
        loss_mode: name in the policy-loss registry.
        settings: the actor's configuration as a flat mapping. The loss takes its keyword parameters from it by name;
            entropy_coeff, use_kl_loss, kl_loss_coef and kl_loss_type are read here.
        agg: counts of the mini-batch.
        old_is_current: there is no column old_log_probs, because the current policy is the old one. Its log-probs serve
            as both, and the metrics of the old policy are reported from here.
    """
    policy_loss = get_policy_loss_fn(loss_mode)
    entropy_coeff = settings["entropy_coeff"]
    needs = ("log_probs", "entropys") if entropy_coeff or old_is_current else ("log_probs",)

    def loss(outputs: Tensors, rows: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = rows["response_mask"]
        old = outputs["log_probs"].detach() if old_is_current else rows["old_log_probs"]
        columns = {
            **rows,
            "log_prob": outputs["log_probs"],
            "old_log_prob": old,
            "rollout_log_prob": rows.get("rollout_log_probs"),
            "loss_agg_mode": agg,
        }
        total, metrics = policy_loss(**bind_arguments(policy_loss, columns, settings))
        shares = {"actor/pg_loss": total}
        if entropy_coeff:
            (entropys,) = zero_padding(mask, outputs["entropys"])
            bonus = agg_loss(entropys, mask, agg)
            total = total - entropy_coeff * bonus
            shares["actor/entropy_loss"] = bonus
        if settings["use_kl_loss"]:
            kind = settings["kl_loss_type"]
            penalty, kl_metrics = kl_loss(outputs["log_probs"], rows["ref_log_prob"], mask, agg, kl_loss_type=kind)
            total = total + settings["kl_loss_coef"] * penalty
            metrics = {**metrics, **kl_metrics}
        if old_is_current:
            metrics = {**metrics, **_old_policy_metrics(old, outputs["entropys"], rows)}
        return total, {**metrics, **{name: _share(value, mask, agg) for name, value in shares.items()}}

    return Objective(loss, needs)


def _old_policy_metrics(old: torch.Tensor, entropys: torch.Tensor, rows: Tensors) -> dict[str, Any]:
    """Entropy of the policy before the update, its training-inference mismatch, and its KL to the reference, if any.

    The same numbers that the operator `old_log_prob` and the trainer report if old log-probs are computed separately.
    """
    mask = rows["response_mask"]
    mismatch = torch.where(mask.bool(), (old - rows["rollout_log_probs"]).abs(), 0)
    metrics = {
        "actor/entropy": mean_parts(entropys.detach(), mask),
        "rollout/logprob_gap_mean": mean_parts(mismatch, mask),
        "rollout/logprob_gap_max": Largest(mismatch.max()),
    }
    if "ref_log_prob" in rows:
        log_ratio = rows["ref_log_prob"] - old
        metrics["actor/ref_kl"] = mean_parts(log_ratio.exp() - log_ratio - 1, mask)
    return metrics


def value_objective(cliprange_value: float, loss_coef: float, agg: LossAggregation) -> Objective:
    """loss_coef * clipped squared error of the values."""

    def loss(outputs: Tensors, rows: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
        total, metrics = value_loss(
            outputs["values"],
            rows["returns"],
            rows["values"],
            rows["response_mask"],
            agg,
            cliprange_value=cliprange_value,
        )
        return loss_coef * total, {**metrics, "critic/vf_loss": _share(total, rows["response_mask"], agg)}

    return Objective(loss, ("values",))


def sft_objective(agg: LossAggregation) -> Objective:
    """Negative log-likelihood of the response tokens."""

    def loss(outputs: Tensors, rows: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
        total, metrics = sft_nll(outputs["log_probs"], rows["response_mask"], agg)
        return total, metrics

    return Objective(loss, ("log_probs",))
