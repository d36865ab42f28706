"""Tracking: sends the metrics and samples of a run to several trackers. A failing tracker does not stop training."""

import difflib
import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.compat.hook import published_names
from verl.tracking.trackers import TRACKER_REGISTRY, Rows, Run
from verl.utils.log import setup_logging

__all__ = ["TRACKER_REGISTRY", "Tracking", "check_trackers", "setup_logging"]

logger = logging.getLogger(__name__)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError if a tracker is unknown or its package is not installed. Imports nothing."""
    for name in names:
        if name not in TRACKER_REGISTRY:
            near = difflib.get_close_matches(name, TRACKER_REGISTRY, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"no tracker is called {name!r}: {hint}known: {', '.join(TRACKER_REGISTRY)}")
        package = TRACKER_REGISTRY[name].package
        if package is not None and not _installed(package):
            raise ValueError(
                f"the tracker {name!r} needs the package {package}, which is not installed: "
                f"pip install {package}, or remove {name!r} from trainer.logger"
            )


def _installed(package: str) -> bool:
    # a folder of that name in the working directory (wandb creates one) is found too, but has no origin
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class Tracking:
    """The trackers of one run.

        with Tracking(["console", "jsonl"], "project", "run-1", config, "checkpoints/run-1") as tracking:
            tracking.log({"critic/score/mean": 0.5}, step=1)

    A resumed run continues the same tracker run. jsonl and tensorboard drop the steps after the checkpoint; wandb,
    mlflow and swanlab cannot delete them and log them twice.

    Args:
        backends: names of TRACKER_REGISTRY.
        project_name, experiment_name: passed to the trackers.
        config: flat config to record.
        default_local_dir: folder for local files.
        resume_step: step of the checkpoint that the run resumes from; 0 for a new run.

    Raises:
        ValueError: if a tracker is unknown or its package is missing. Errors of a tracker that cannot start are raised.
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
        self.failures: Counter[str] = Counter()  # tracker -> failed calls
        self.not_finite: Counter[str] = Counter()  # metric -> steps with NaN or infinity

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step. Raises ValueError if a value is not a number."""
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        broken = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        for name, value in broken.items():
            if name not in self.not_finite:
                logger.error("step %d: %s is %s", step, name, value)
        self.not_finite.update(broken.keys())
        self._call_all(lambda tracker: tracker.log(numbers, step))

    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        """Log a table of samples: a list of rows with equal keys."""
        if rows:
            self._call_all(lambda tracker: tracker.log_samples(name, rows, step))

    def finish(self, failed: bool = False) -> None:
        """Close the trackers and log a summary of their failures."""
        self._call_all(lambda tracker: tracker.finish(failed))
        for name, count in self.failures.items():
            logger.warning("tracker %s: %d calls failed", name, count)
        for name, count in self.not_finite.items():
            logger.error("%s was not finite in %d steps", name, count)
        self.trackers = {}

    def _call_all(self, call: Callable[[Any], None]) -> None:
        """Call every tracker. Trackers may be network services, so a failure is logged and counted, not raised."""
        for name, tracker in self.trackers.items():
            try:
                call(tracker)
            except Exception as error:
                self.failures[name] += 1
                if self.failures[name] == 1:
                    logger.warning(
                        "tracker %s failed (%s: %s); training continues, further failures are counted",
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
        raise ValueError(f"metric {name!r}: expected a number, found {value!r}") from error


__getattr__ = published_names(__name__)
