"""MismatchLimit: stops a run whose rollout and training compute different log-probs for the same tokens.

A policy gradient of tokens whose log-probs are wrong trains something else, and the reward often rises nevertheless.
"""

import logging
from typing import Any

from verl.config.fields import Schema
from verl.config.schema import Config
from verl.modeling.huggingface import experts_of
from verl.trainer.guards.base import Guard
from verl.trainer.view import RunView, StepReport

logger = logging.getLogger("verl.trainer")

_METRIC = "rollout/logprob_gap_mean"

#: mean difference of log-probs in nats, at temperature 1. In 16 bits, rounding causes 0.004 with one engine, 0.04 with
#: two engines or random weights (docs/rollout.md, docs/lora.md), and rows that leak state 0.15 and more
_FLOAT32, _16_BITS = 5e-3, 0.1
#: in a mixture of experts, rounding changes which experts a token gets
_EXPERTS = 2.0
#: in FP8, a difference of the last bit of an activation may become one of the last bit of its code (docs/fp8.md)
_FP8 = 5.0

CAUSES = (
    "Likely causes, in this order: (1) packing, or state of a layer that leaks between the rows of a batch: set "
    "actor_rollout_ref.model.use_remove_padding=false; (2) dtypes: set rollout.dtype and the dtype of the actor to the "
    "same; (3) attention or another layer that the engine implements differently: compare with rollout.name=hf; (4) "
    "template or tokenizer: an agent loop or a custom engine returns other tokens than it sampled; (5) a copy of the "
    "weights that a push does not update: set rollout.check_every=1"
)


def rounding_factor(hf_config: Any, quantization: str | None) -> float:
    """How many times larger the mismatch due to rounding may be than in a dense model without `model.quantization`."""
    return (_EXPERTS if experts_of(hf_config) else 1.0) * (_FP8 if quantization == "fp8" else 1.0)


class RolloutMismatchError(RuntimeError):
    """Rollout and training compute different log-probs for the same tokens."""


class MismatchLimit(Guard):
    """Compares the training-inference mismatch with `rollout.max_mismatch`: the first step that measures it stops
    the run, later ones warn."""

    def __init__(self, config: Schema):
        self.is_on = isinstance(config, Config) and config.actor_rollout_ref.rollout.max_mismatch != 0
        if self.is_on:
            self._settings = config.actor_rollout_ref.rollout
            self._quantization = config.actor_rollout_ref.model.quantization
        self._is_first = True
        self._worst = 0.0  # the largest mismatch that was warned of

    def after_step(self, view: RunView, report: StepReport) -> None:
        """Raises RolloutMismatchError in the first step that measures a mismatch above the limit."""
        if _METRIC not in report:
            return
        versions = report.batch.tensors.get("weight_version")
        if versions is not None and versions.min() < report.step - 1:
            return  # sampled by an earlier policy, whose log-probs training has changed
        is_first, self._is_first = self._is_first, False
        least = max(self._limit(_FLOAT32), 2 * self._worst)
        if report[_METRIC] <= least or (mismatch := self._mismatch(report)) <= least:
            return
        if not all(view.roles["rollout"].samples_policy()):
            return
        is_narrow = any(view.roles["actor"].computes_in_16_bits())
        factor = rounding_factor(view.run.inputs.limits.hf_config, self._quantization)
        limit = self._limit(factor * (_16_BITS if is_narrow else _FLOAT32))
        if mismatch <= limit:
            return
        message = (
            f"step {report.step}: rollout/logprob_gap_mean is {mismatch:.3g}, expected at most {limit:.3g} ("
            f"{'16 bits' if is_narrow else 'float32'}, rollout.name={self._settings.name}): rollout and training "
            f"compute different log-probs for the same tokens, so the updates follow a wrong gradient. {CAUSES}. "
            "actor_rollout_ref.rollout.max_mismatch sets the limit (0: none)"
        )
        if is_first:
            raise RolloutMismatchError(message)
        self._worst = mismatch
        logger.warning("%s", message)

    def _limit(self, at_temperature_1: float) -> float:
        """The largest mismatch in nats, which a lower temperature scales up."""
        if self._settings.max_mismatch is not None:
            return self._settings.max_mismatch
        return at_temperature_1 / min(1.0, self._settings.temperature)

    def _mismatch(self, report: StepReport) -> float:
        """The mean difference in nats. If filters such as top_p are not applied in training, log-probs of the rollout
        are larger, and only tokens with smaller ones count."""
        columns = report.batch.tensors
        if self._settings.filters_log_probs or not self._settings.active_filters():
            return report[_METRIC]
        difference = (columns["old_log_probs"] - columns["rollout_log_probs"])[columns["response_mask"].bool()]
        return difference.clamp(min=0).mean().item()
