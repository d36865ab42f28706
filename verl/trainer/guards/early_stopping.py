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
from verl.trainer.view import RunView, StepReport

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


class _Tracker:
    """The best value of one metric, and the number of validations since.

    Args:
        metric: its name; None: the main metric of the validation.
        mode: "max", "min" or "auto".
        min_delta: smallest change that counts.
        key: of the setting that names the metric, for errors.
    """

    def __init__(self, metric: str | None, mode: str, min_delta: float, key: str):
        self.metric, self.mode, self.min_delta, self.key = metric, mode, min_delta, key
        self.best: Best | None = None
        self.without_improvement = 0
        self._name: str | None = None  # of the metric in the validations so far

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether a validation is the best so far. One without the metric, or with NaN, never is.

        Raises:
            NoMetricError: the first validation does not have the metric.
        """
        name, value = self._compared(step, metrics)
        mode = direction(name, self.mode)
        sign = -1.0 if mode == "min" else 1.0
        gain = math.inf if self.best is None else sign * (value - self.best.value)
        if math.isnan(value) or not gain > self.min_delta:
            self.without_improvement += 1
            return False
        self.best, self.without_improvement = Best(name, value, step, mode), 0
        return True

    def _compared(self, step: int, metrics: Mapping[str, float]) -> tuple[str, float]:
        """The name and the value of the metric; NaN, with a warning, if this validation does not have it."""
        known = self.best.metric if self.best else self._name
        try:
            name, value = self.value_of(metrics)
            problem = f"{name} is {value}" if math.isnan(value) else f"its main metric is {name}, not {known}"
        except NoMetricError as error:
            if known is None:
                raise
            name, value, problem = known, math.nan, str(error)
        self._name = known = known or name
        if math.isnan(value) or name != known:
            logger.warning("%s: the validation of step %d is not an improvement: %s", self.key, step, problem)
            value = math.nan
        return known, value

    def value_of(self, metrics: Mapping[str, float]) -> tuple[str, float]:
        """Return the name and the value of the metric in a validation. Raises NoMetricError if it is not there."""
        if self.metric is None:
            return main_metric(metrics)
        if self.metric not in metrics:
            known = [name for name in metrics if name.startswith(("val", self.metric.partition("/")[0]))]
            raise NoMetricError(
                f"{self.key}: the validation has no metric {self.metric!r}: {did_you_mean(self.metric, known)}"
            )
        return self.metric, metrics[self.metric]

    def state_dict(self) -> dict[str, Any]:
        best = asdict(self.best) if self.best else None
        return {"metric": self.metric, "best": best, "without_improvement": self.without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, unless it is of another metric or mode."""
        best = Best(**state["best"]) if state["best"] else None
        if best is None or (state["metric"] == self.metric and direction(best.metric, self.mode) == best.mode):
            self.best, self.without_improvement = best, state["without_improvement"]
        else:
            logger.warning("%s has changed: the best value of %s in the checkpoint is not used", self.key, best.metric)


class ValidationWatch(Guard):
    """Follows the validations of a run for `trainer.save_best` and `trainer.early_stopping`.

    Attributes:
        improved: whether the validation of the last step was the best one.
        is_pending: whether the validation of the last step is due, but was put off by an interruption.
    """

    def __init__(self, config: Schema):
        self._settings = trainer = config.trainer
        stopping, best = trainer.early_stopping, trainer.save_best
        metric = best if isinstance(best, str) else None
        self.patience = stopping.patience
        self._best = _Tracker(metric, trainer.save_best_mode, 0.0, "trainer.save_best") if best else None
        self._stopping = None
        if stopping.patience:
            mode = trainer.save_best_mode if stopping.metric is None and stopping.mode == "auto" else stopping.mode
            self._stopping = _Tracker(
                stopping.metric or metric, mode, stopping.min_delta, "trainer.early_stopping.metric"
            )
        self.improved = False
        self.is_pending = False

    @property
    def best(self) -> Best | None:
        """The best validation of `trainer.save_best`; None without one."""
        return self._best.best if self._best else None

    @property
    def reason(self) -> str | None:
        """Why `trainer.early_stopping` ends the run; None if it does not."""
        stopping = self._stopping
        if stopping is None or stopping.without_improvement < self.patience or stopping.best is None:
            return None
        best, delta = stopping.best, f" by more than {stopping.min_delta:g}" if stopping.min_delta else ""
        return (
            f"{best.metric} has not improved{delta} in {stopping.without_improvement} validations "
            f"(best: {best.value:.4g} at step {best.step}; trainer.early_stopping.patience={self.patience})"
        )

    def after_step(self, view: RunView, report: StepReport) -> None:
        self.improved = False

    def after_validation(self, view: RunView, metrics: Mapping[str, float]) -> Action | None:
        if view.step == 0 or self._settings.val_only:
            for tracker in (self._best, self._stopping):
                if tracker is not None:
                    tracker.value_of(metrics)
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
        """Update the best value and the patience with a validation."""
        self.is_pending = False
        self.improved = self._best is not None and self._best.observe(step, metrics)
        if self._stopping is not None:
            self._stopping.observe(step, metrics)

    def state_dict(self) -> dict[str, Any]:
        trackers = {"best": self._best, "stopping": self._stopping}
        states = {name: tracker and tracker.state_dict() for name, tracker in trackers.items()}
        return states | {"skipped": self.is_pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tracker in (("best", self._best), ("stopping", self._stopping)):
            if tracker is not None and state.get(name):
                tracker.load_state_dict(state[name])
        self.is_pending = state["skipped"]


def direction(metric: str, mode: str) -> str:
    """Return "max" or "min". auto: "min" for a metric whose name ends in loss."""
    return mode if mode != "auto" else "min" if metric.endswith("loss") else "max"


def main_metric(metrics: Mapping[str, float]) -> tuple[str, float]:
    """Return the name and the value of the main metric of a validation.

    RL: val-core/<source>/<acc or reward>/mean@N; with several sources, their mean. SFT: val/loss.

    Raises:
        NoMetricError: the validation has neither.
    """
    core = [name for name in metrics if re.fullmatch(r"val-core/.*/mean@\d+", name)]
    if len(core) == 1:
        return core[0], metrics[core[0]]
    if core:
        return f"mean of {', '.join(sorted(core))}", sum(metrics[name] for name in core) / len(core)
    if "val/loss" in metrics:
        return "val/loss", metrics["val/loss"]
    raise NoMetricError(
        "the validation has no main metric (val-core/<source>/acc/mean@N or val/loss): set trainer.save_best or "
        f"trainer.early_stopping.metric to one of {', '.join(sorted(metrics)) or '(no metrics)'}"
    )
