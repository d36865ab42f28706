"""The loss of the actor: policy loss, distillation, entropy bonus and KL."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from verl.algorithms.binding import bind_arguments
from verl.algorithms.distillation import distillation_loss
from verl.algorithms.kl import k3, kl_loss
from verl.algorithms.masked import Largest, LossAggregation, agg_loss, mean_parts, zero_padding
from verl.algorithms.policy_losses import CLIP_METRICS, LossAndMetrics, PolicyLossFn, as_parts, get_policy_loss_fn


def actor_loss(
    outputs: Mapping[str, torch.Tensor],
    columns: Mapping[str, torch.Tensor],
    *,
    loss_mode: str,
    settings: Mapping[str, Any],
    agg: LossAggregation,
    old_is_current: bool = False,
    distillation: Mapping[str, Any] | None = None,
) -> LossAndMetrics:
    """Policy loss + distillation_loss_coef * distillation - entropy_coeff * entropy + kl_loss_coef * KL(policy,
    reference), of one micro-batch.

    Args:
        outputs: model outputs: log_probs (b, T), and entropys (b, T) with an entropy bonus or `old_is_current`; those
            of `distillation_loss`.
        columns: batch columns: response_mask (b, T) and those that the loss reads.
        loss_mode: name of a registered policy loss.
        settings: the actor's configuration as a flat mapping, from which the loss gets its keyword parameters;
            entropy_coeff, use_kl_loss, kl_loss_coef and kl_loss_type are read here. If loss_agg_mode is None, the
            default of the policy loss is used.
        agg: counts of the whole mini-batch, which divide every term.
        old_is_current: there is no column old_log_probs, since the current policy is the old one. The metrics of the
            old policy are then reported here.
        distillation: the section `distillation.distillation_loss`; None: no distillation. Without use_task_rewards,
            there is no policy loss, and the coefficient is 1.

    Raises:
        ValueError: the policy loss does not return a scalar and metrics.
    """
    mask = columns["response_mask"]
    old = outputs["log_probs"].detach() if old_is_current else columns["old_log_probs"]
    total, metrics, shares = torch.zeros((), device=mask.device), {}, {}
    has_task = distillation is None or distillation["use_task_rewards"]
    if has_task:
        total, metrics = _policy_loss(outputs["log_probs"], old, columns, loss_mode, settings, agg)
        shares["actor/pg_loss"] = total
    if distillation is not None:
        term, further = distillation_loss(outputs, columns, old, agg, distillation)
        total = total + (distillation["distillation_loss_coef"] if has_task else 1) * term
        metrics, shares["distillation/loss"] = {**metrics, **further}, term
    if settings["entropy_coeff"]:
        (entropys,) = zero_padding(mask, outputs["entropys"])
        bonus = agg_loss(entropys, mask, agg)
        total = total - settings["entropy_coeff"] * bonus
        shares["actor/entropy_loss"] = bonus
    if settings["use_kl_loss"]:
        kind = settings["kl_loss_type"]
        penalty, kl_metrics = kl_loss(outputs["log_probs"], columns["ref_log_prob"], mask, agg, kl_loss_type=kind)
        total = total + settings["kl_loss_coef"] * penalty
        metrics = {**metrics, **kl_metrics}
    if old_is_current:
        metrics = {**metrics, **_old_policy_metrics(old, outputs["entropys"], columns)}
    return total, {**metrics, **{name: agg.share(value, mask) for name, value in shares.items()}}


def _policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    loss_mode: str,
    settings: Mapping[str, Any],
    agg: LossAggregation,
) -> LossAndMetrics:
    """The registered policy loss, with its arguments bound by name."""
    sampled = {"log_prob": log_prob, "old_log_prob": old_log_prob, "rollout_log_prob": columns.get("rollout_log_probs")}
    policy_loss = get_policy_loss_fn(loss_mode)
    loss_agg = loss_aggregation(policy_loss, settings.get("loss_agg_mode"), agg)
    arguments = {**columns, **sampled, "loss_agg_mode": loss_agg}
    bound = bind_arguments(policy_loss, arguments, settings, custom_loss_config(settings, loss_agg))
    return _checked_result(loss_mode, policy_loss(**bound), columns["response_mask"])


def loss_aggregation(policy_loss: PolicyLossFn, mode: str | None, agg: LossAggregation) -> LossAggregation:
    """Return `agg`, or, if no mode was set, the same counts with the mode that is the default of the loss."""
    default = inspect.signature(policy_loss).parameters.get("loss_agg_mode")
    return agg.with_mode(default.default) if mode is None and default and isinstance(default.default, str) else agg


def custom_loss_config(settings: Mapping[str, Any], agg: LossAggregation) -> dict[str, Any]:
    """Return what a loss written for public verl reads from its parameter `config`, with verl's defaults for None.

    A clip range that was not set is None in `settings`, so that a loss keeps its published value. verl's losses read
    the numbers from `config` instead.
    """
    ratio = 0.2 if settings.get("clip_ratio") is None else settings["clip_ratio"]
    defaults = {"clip_ratio": ratio, "clip_ratio_low": ratio, "clip_ratio_high": ratio, "clip_ratio_c": 3.0}
    counts = {
        "dp_size": 1,
        "batch_num_tokens": agg.num_tokens,
        "global_batch_size": agg.num_sequences,
        "loss_scale_factor": agg.scale_factor,
    }
    resolved = {name: value for name, value in defaults.items() if settings.get(name) is None}
    loss_settings = dict(settings.get("policy_loss") or {})
    if loss_settings.get("ppo_kl_coef") is None:
        loss_settings["ppo_kl_coef"] = 0.1
    return {**settings, **resolved, "policy_loss": loss_settings, "loss_agg_mode": agg, "global_batch_info": counts}


def _checked_result(loss_mode: str, result: Any, mask: torch.Tensor) -> LossAndMetrics:
    """Return the loss and metrics of a policy loss. Raises ValueError with its name if the result is not of this form.

    Losses for older releases of public verl return four tensors instead: loss, clipped fraction, KL to the old policy
    and the fraction bounded by the dual clip.
    """
    if isinstance(result, tuple | list) and result and all(map(_is_scalar, result[:1])):
        total, *metrics = result
        if len(metrics) == 1 and isinstance(metrics[0], Mapping):
            return total, dict(metrics[0])
        if len(metrics) == len(CLIP_METRICS) and all(map(_is_scalar, metrics)):
            return total, as_parts(CLIP_METRICS, metrics, mask)
    raise ValueError(
        f"policy loss {loss_mode!r}: expected (scalar tensor, dict of metrics), found {_describe(result)}: return "
        "agg_loss(losses, response_mask, loss_agg_mode), {}"
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _describe(result: Any) -> str:
    if isinstance(result, tuple | list):
        return f"({', '.join(map(_describe, result))})"
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return "None" if result is None else type(result).__name__


def _old_policy_metrics(
    old: torch.Tensor, entropys: torch.Tensor, columns: Mapping[str, torch.Tensor]
) -> dict[str, object]:
    """Entropy of the policy before the update, its training-inference mismatch, and its KL to the reference, if any.

    Equal to the metrics that the operator `old_log_prob` and the trainer report otherwise.
    """
    mask = columns["response_mask"]
    mismatch = torch.where(mask.bool(), (old - columns["rollout_log_probs"]).abs(), 0)
    metrics = {
        "actor/entropy": mean_parts(entropys.detach(), mask),
        "rollout/logprob_gap_mean": mean_parts(mismatch, mask),
        "rollout/logprob_gap_max": Largest(mismatch.max()),
    }
    if "ref_log_prob" in columns:
        metrics["actor/ref_kl"] = mean_parts(k3(old - columns["ref_log_prob"]), mask)
    return metrics
