"""ValidationWatch: which validation of a run was the best, and whether the run has stopped improving.

Its state is in every checkpoint, so a resumed run makes the same decisions as an uninterrupted one.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from verl.config.fields import Schema
from verl.registry import did_you_mean
from verl.trainer.guards.base import STOP, Action, Guard
from verl.trainer.view import RunView

logger = logging.getLogger("verl.trainer")


@dataclass(frozen=True)
class Best:
    """The best value of a metric so far, and the step whose weights had it."""

    metric: str
    value: float
    step: int
    mode: str


class NoMetricError(ValueError):
    """The validation does not have the metric that a setting names."""


class ValidationWatch(Guard):
    """Follows a metric of the validations of a run, for `trainer.save_best` and `trainer.early_stopping`. is_pending:
    whether the validation of the last step is due, but was put off by an interruption."""

    def __init__(self, config: Schema):
        self._settings = trainer = config.trainer
        self.metric = trainer.save_best if isinstance(trainer.save_best, str) else None  # None: the main metric
        self.patience, self._min_delta = trainer.early_stopping.patience, trainer.early_stopping.min_delta
        self._best: Best | None = None
        self._reference: float | None = None  # of early stopping: a smaller change than min_delta keeps it
        self._without_improvement = 0  # validations
        self._name: str | None = None  # of the metric in the validations so far
        self.is_pending = False

    @property
    def best(self) -> Best | None:
        """The best validation of `trainer.save_best`; None without one."""
        return self._best if self._settings.save_best else None

    def is_best(self, step: int) -> bool:
        """Whether the validation of a step is the best one, with save_best."""
        return self.best is not None and self.best.step == step

    @property
    def reason(self) -> str | None:
        """Why `trainer.early_stopping` ends the run; None if it does not."""
        best = self._best
        if not self.patience or self._without_improvement < self.patience or best is None:
            return None
        delta = f" by more than {self._min_delta:g}" if self._min_delta else ""
        return (
            f"{best.metric} has not improved{delta} in {self._without_improvement} validations "
            f"(best: {best.value:.4g} at step {best.step}; trainer.early_stopping.patience={self.patience})"
        )

    def after_validation(self, view: RunView, metrics: Mapping[str, float]) -> Action | None:
        if not (self._settings.save_best or self.patience):
            self.is_pending = False
            return None
        if view.step == 0 or self._settings.val_only:
            self.value_of(metrics)
            return None
        try:
            self.observe(view.step, metrics)
        except NoMetricError:
            if self._settings.save_at_end:  # a misspelled metric must not lose the trained steps
                view.checkpointer.save(view.step)
                view.checkpointer.wait()
            raise
        return STOP(self.reason) if self.reason is not None else None

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Update the best value and the patience with a validation. One without the metric, or with NaN, is never the
        best. Raises NoMetricError if the first validation does not have the metric."""
        self.is_pending = False
        name, value = self._compared(step, metrics)
        mode = direction(name, self._settings.save_best_mode)
        sign = -1.0 if mode == "min" else 1.0
        is_number = not math.isnan(value)
        if is_number and (self._best is None or sign * value > sign * self._best.value):
            self._best = Best(name, value, step, mode)
        if is_number and (self._reference is None or sign * (value - self._reference) > self._min_delta):
            self._reference, self._without_improvement = value, 0
        else:
            self._without_improvement += 1

    def _compared(self, step: int, metrics: Mapping[str, float]) -> tuple[str, float]:
        """The name and the value of the metric; NaN, with a warning, if this validation does not have it."""
        known = self._best.metric if self._best else self._name
        try:
            name, value = self.value_of(metrics)
            problem = f"{name} is {value}" if math.isnan(value) else f"its main metric is {name}, not {known}"
        except NoMetricError as error:
            if known is None:
                raise
            name, value, problem = known, math.nan, str(error)
        self._name = known = known or name
        if math.isnan(value) or name != known:
            logger.warning("trainer.save_best: the validation of step %d is not an improvement: %s", step, problem)
            value = math.nan
        return known, value

    def value_of(self, metrics: Mapping[str, float]) -> tuple[str, float]:
        """Return the name and the value of the metric in a validation. Raises NoMetricError if it is not there."""
        if self.metric is None:
            return main_metric(metrics)
        if self.metric not in metrics:
            known = [name for name in metrics if name.startswith(("val", self.metric.partition("/")[0]))]
            raise NoMetricError(
                f"trainer.save_best: the validation has no metric {self.metric!r}: {did_you_mean(self.metric, known)}"
            )
        return self.metric, metrics[self.metric]

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "best": asdict(self._best) if self._best else None,
            "reference": self._reference,
            "without_improvement": self._without_improvement,
            "skipped": self.is_pending,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; of another metric or mode, only whether a validation is pending."""
        best = Best(**state["best"]) if state["best"] else None
        self.is_pending = state["skipped"]
        mode = self._settings.save_best_mode
        if best is None or (state["metric"] == self.metric and direction(best.metric, mode) == best.mode):
            self._best, self._reference = best, state["reference"]
            self._without_improvement = state["without_improvement"]
        else:
            logger.warning(
                "trainer.save_best has changed: the best value of %s in the checkpoint is not used", best.metric
            )


def direction(metric: str, mode: str) -> str:
    """Return "max" or "min". auto: "min" for a metric whose name ends in loss."""
    return mode if mode != "auto" else "min" if metric.endswith("loss") else "max"


def main_metric(metrics: Mapping[str, float]) -> tuple[str, float]:
    """Name and value of the main metric of a validation: in RL, val-core/<source>/<acc or reward>/mean@N, with several
    sources their mean; in SFT, val/loss. Raises NoMetricError if it has neither."""
    core = [name for name in metrics if re.fullmatch(r"val-core/.*/mean@\d+", name)]
    if len(core) == 1:
        return core[0], metrics[core[0]]
    if core:
        return f"mean of {', '.join(sorted(core))}", sum(metrics[name] for name in core) / len(core)
    if "val/loss" in metrics:
        return "val/loss", metrics["val/loss"]
    raise NoMetricError(
        "the validation has no main metric (val-core/<source>/acc/mean@N or val/loss): set trainer.save_best to "
        f"one of {', '.join(sorted(metrics)) or '(no metrics)'}"
    )
