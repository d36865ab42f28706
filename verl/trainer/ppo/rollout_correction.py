"""Correction of the training-inference mismatch, as a flow edit.

    three policies    ... old_log_prob -> rollout_correction -> [ref] -> [values] -> adv -> update_actor
    two (bypass)      ... old_log_prob (a copy of rollout_log_probs) -> ... -> adv -> update_actor

With three policies (the rollout policy, the trainer's before the update, and the current one) the operator
`rollout_correction` adds the importance weights `rollout_is_weights` and the rejection mask `loss_mask`. Rewards,
baselines and advantages use the original mask: a rejected response still counts in the baseline of its group, and the
reward is on the last token, which may be rejected. Only the updates skip rejected tokens.

With two policies nothing is recomputed, and the loss `bypass_mode` compares the current policy with the rollout policy.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from verl.algorithms.masked import checked_column
from verl.algorithms.policy_losses import get_policy_loss_fn
from verl.algorithms.rollout_correction import (
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    parse_rejections,
)
from verl.config import ConfigError, Problem, schema
from verl.dataflow import CONTROLLER, DataFlow, Operator
from verl.protocol import DataProto

_KEY = "algorithm.rollout_correction."
_MODES = ("rollout_is", "rollout_rs")
_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


def rollout_correction(correction: schema.RolloutCorrectionConfig) -> Callable[[DataProto], DataProto]:
    """The operator that adds the configured weights and mask, and the metrics rollout_corr/*."""

    def correct(batch: DataProto) -> DataProto:
        columns = batch.tensors
        weights, loss_mask, metrics = compute_rollout_correction_and_rejection_mask(
            columns["old_log_probs"],
            columns["rollout_log_probs"],
            columns["response_mask"],
            rollout_is=correction.rollout_is,
            rollout_is_threshold=correction.rollout_is_threshold,
            rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
            rollout_rs=correction.rollout_rs,
            rollout_rs_threshold=correction.rollout_rs_threshold,
        )
        output = {"loss_mask": loss_mask} if correction.rollout_rs is not None else {}
        output |= {"rollout_is_weights": weights} if weights is not None else {}
        return DataProto.from_dict(output, meta_info={"metrics": metrics})

    return correct


def copy_log_probs(flow: DataFlow) -> DataFlow:
    """Use rollout log-probs as old_log_probs. A step raises ValueError if one is NaN or infinite."""

    def copy(batch: DataProto) -> dict:
        checked_column("rollout_log_probs", batch.batch["rollout_log_probs"], batch.batch["response_mask"])
        return {"old_log_probs": batch.batch["rollout_log_probs"]}

    reads = ("rollout_log_probs", "response_mask")
    return flow.replace("old_log_prob", Operator("old_log_prob", copy, reads, ("old_log_probs",), CONTROLLER))


def correct_rollout(flow: DataFlow, config: schema.Config) -> DataFlow:
    """Edit the flow as configured by `algorithm.rollout_correction`; unchanged by default."""
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode:
        return copy_log_probs(flow)
    writes = ("rollout_is_weights",) * (correction.rollout_is is not None)
    writes += ("loss_mask",) * (correction.rollout_rs is not None)
    if not writes:
        return flow
    reads = ("old_log_probs", "rollout_log_probs", "response_mask")
    flow.insert_after(
        "old_log_prob", Operator("rollout_correction", rollout_correction(correction), reads, writes, CONTROLLER)
    )
    for update in ("update_critic", "update_actor"):
        if update in flow:
            flow.replace(update, replace(flow[update], reads=(*flow[update].reads, *writes)))
    return flow


def check_correction(config: schema.Config) -> None:
    """Raise ConfigError for a correction that is invalid or not supported by the loss."""
    problems = list(_problems(config))
    if problems:
        raise ConfigError(problems)


def _problems(config: schema.Config) -> Iterator[Problem]:
    correction, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.rollout_rs is not None:
        try:
            parse_rejections(correction.rollout_rs, correction.rollout_rs_threshold)
        except ValueError as error:
            yield Problem(_KEY + "rollout_rs", str(error))
    if correction.rollout_is is not None:
        try:  # with one token
            token = torch.ones(1, 1)
            compute_rollout_correction_weights(token, token, correction.rollout_is, correction.rollout_is_threshold)
        except ValueError as error:
            yield Problem(_KEY + "rollout_is_threshold", str(error))
    modes = [name for name, value in correction.model_dump().items() if name in _MODES and value is not None]
    if correction.bypass_mode:
        modes += ["loss_type"] if correction.loss_type != "ppo_clip" else []
        if modes and loss != "bypass_mode":
            yield Problem(_LOSS, f"{loss!r}, but {_KEY}{modes[0]} in bypass mode needs the loss bypass_mode")
        if correction.rollout_is is not None and correction.loss_type == "ppo_clip":
            yield Problem(
                _KEY + "rollout_is",
                "in bypass mode the ratio of ppo_clip already is the importance weight: leave it null",
            )
        if filters := config.actor_rollout_ref.rollout.active_filters():
            yield Problem(
                _KEY + "bypass_mode",
                f"true, but the log-probs of the rollout are those of the distribution filtered by {filters}, and "
                "without the pass old_log_prob, which records the tokens that are kept, training computes those of the "
                f"full distribution: use false with {_KEY}rollout_is=token, or turn the filters off",
            )
        if correction.rollout_is_batch_normalize:
            yield Problem(
                _KEY + "rollout_is_batch_normalize",
                "true, but in bypass mode no weights are computed for the batch: use false",
            )
    elif loss == "bypass_mode":
        yield Problem(_KEY + "bypass_mode", f"false, but {_LOSS} is bypass_mode: use true, or another loss")
    elif correction.rollout_is and "rollout_is_weights" not in inspect.signature(get_policy_loss_fn(loss)).parameters:
        yield Problem(_KEY + "rollout_is", f"the loss {loss!r} does not take rollout_is_weights: leave it null")
