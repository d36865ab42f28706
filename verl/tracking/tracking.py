"""Tracking: metrics and sampled answers of a run to any number of trackers, none of which can stop the training."""

import difflib
import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.tracking.trackers import TRACKER_REGISTRY, Rows, Run
from verl.utils.log import setup_logging

__all__ = ["TRACKER_REGISTRY", "Tracking", "check_trackers", "setup_logging"]

logger = logging.getLogger(__name__)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker that does not exist or whose package is not installed. Imports nothing."""
    for name in names:
        if name not in TRACKER_REGISTRY:
            near = difflib.get_close_matches(name, TRACKER_REGISTRY, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"no tracker is called {name!r}: {hint}known: {', '.join(TRACKER_REGISTRY)}")
        package = TRACKER_REGISTRY[name].package
        if package is not None and not _installed(package):
            raise ValueError(
                f"the tracker {name!r} needs the package {package}, which is not installed: "
                f"pip install {package}, or take {name!r} out of trainer.logger"
            )


def _installed(package: str) -> bool:
    # A folder of the same name in the working directory is found too, but without an origin: wandb makes such a one.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class Tracking:
    """The trackers of one run.

    backends: words of TRACKER_REGISTRY. config: flat, for the record. default_local_dir: where trackers keep files.
    resume_step: the step of the checkpoint that the run goes on from, 0 when it starts. Trackers go on as the same run.
    jsonl and tensorboard hold no step twice; wandb, mlflow and swanlab cannot take back what was logged after the
    checkpoint, so those steps are logged again there.
    Raises ValueError for an unknown tracker or a missing package, and what a tracker raises that cannot start.
    """

    def __init__(
        self,
        backends: str | Sequence[str],
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        default_local_dir: str | Path,
        resume_step: int = 0,
    ):
        names = [backends] if isinstance(backends, str) else list(dict.fromkeys(backends))
        check_trackers(names)
        folder = Path(default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(project_name, experiment_name, config, folder, resume_step)
        self.trackers = {name: TRACKER_REGISTRY[name](run) for name in names}
        self.failures: Counter[str] = Counter()  # tracker -> calls that it lost
        self.not_finite: Counter[str] = Counter()  # metric -> steps at which it was NaN or infinite

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the metrics of `step` to every tracker. Raises ValueError for a value that is not a number."""
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        broken = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        for name, value in broken.items():
            if name not in self.not_finite:
                logger.error("step %d: %s is %s", step, name, value)
        self.not_finite.update(broken.keys())
        self._call_all(lambda tracker: tracker.log(numbers, step))

    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        """Hand a table of sampled answers to every tracker: a list of rows with equal keys."""
        if rows:
            self._call_all(lambda tracker: tracker.log_samples(name, rows, step))

    def finish(self, failed: bool = False) -> None:
        """Close the trackers and sum up what went wrong on the way."""
        self._call_all(lambda tracker: tracker.finish(failed))
        for name, count in self.failures.items():
            logger.warning("the tracker %s lost %d calls", name, count)
        for name, count in self.not_finite.items():
            logger.error("%s was not finite at %d steps", name, count)
        self.trackers = {}

    def _call_all(self, call: Callable[[Any], None]) -> None:
        """A tracker is a service of others over a network: its failure is said and counted, and training goes on."""
        for name, tracker in self.trackers.items():
            try:
                call(tracker)
            except Exception as error:
                self.failures[name] += 1
                if self.failures[name] == 1:
                    logger.warning(
                        "the tracker %s failed (%s: %s); training goes on, further failures are counted",
                        name,
                        type(error).__name__,
                        error,
                        exc_info=True,
                    )

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.finish(failed=kind is not None)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the metric {name!r} is {value!r}: expected a number") from error
