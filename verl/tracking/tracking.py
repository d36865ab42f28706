"""Tracking: sends the metrics and samples of a run to several trackers.

A tracker that fails, hangs or is slow does not stop or delay training: trackers of services are each called in a
separate thread, and failures are logged and counted.
"""

import difflib
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from verl.tracking.console import TrainingProgress
from verl.tracking.trackers import TRACKER_REGISTRY, Rows, Run, Tracker
from verl.utils.log import setup_logging
from verl.utils.packages import is_installed

__all__ = ["TRACKER_REGISTRY", "Tracking", "check_trackers", "setup_logging"]

logger = logging.getLogger(__name__)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError if a tracker is unknown or its package is not installed. Imports nothing."""
    for name in names:
        if name not in TRACKER_REGISTRY:
            near = difflib.get_close_matches(name, TRACKER_REGISTRY, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"no tracker is called {name!r}: {hint}known: {', '.join(TRACKER_REGISTRY)}")
        if not (isinstance(TRACKER_REGISTRY[name], type) and issubclass(TRACKER_REGISTRY[name], Tracker)):
            raise ValueError(
                f"tracker {name!r}: expected a subclass of verl.tracking.trackers.Tracker, found "
                f"{TRACKER_REGISTRY[name]!r}"
            )
        package = TRACKER_REGISTRY[name].package
        if package is not None and not is_installed(package):
            raise ValueError(
                f"the tracker {name!r} needs the package {package}, which is not installed: "
                f"pip install {package}, or remove {name!r} from trainer.logger"
            )


#: seconds that a tracker may take to start, and to make the remaining calls at the end of the run
START_SECONDS = 300.0
FINISH_SECONDS = 120.0
#: seconds after which a call that has not returned is reported
SLOW_SECONDS = 60.0


class _Caller:
    """Calls one tracker. Failures are logged and counted, not raised. background: make all calls in a thread, in order.
    Raises ValueError if the tracker cannot be constructed, or takes longer than START_SECONDS."""

    def __init__(self, name: str, make: Callable[[], Tracker], background: bool):
        self.name = name
        self.failures = 0
        self._calls: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._since: float | None = None  # start of the running call
        self._reported = False
        self._thread: threading.Thread | None = None
        started: Future[Tracker] = Future()
        if background:
            self._thread = threading.Thread(target=self._serve, args=(make, started), name=name, daemon=True)
            self._thread.start()
        else:
            _construct(make, started)
        try:
            self.tracker = started.result(START_SECONDS)
        except TimeoutError:
            raise ValueError(
                f"the tracker {name!r} has not started after {START_SECONDS:.0f} s: check its service and the network, "
                f"or remove {name!r} from trainer.logger"
            ) from None
        except Exception as error:
            raise ValueError(
                f"the tracker {name!r} cannot start: {type(error).__name__}: {error}. Fix this, or remove {name!r} "
                "from trainer.logger"
            ) from error

    def call(self, call: Callable[[Tracker], None]) -> None:
        """Make a call, now or in the thread."""
        if self._thread is None:
            self._make(call)
            return
        self._calls.put(call)
        since = self._since
        if since is not None and time.monotonic() - since > SLOW_SECONDS and not self._reported:
            self._reported = True
            logger.warning(
                "tracker %s has not responded for %.0f s; training continues, and %d calls are waiting",
                self.name,
                time.monotonic() - since,
                self._calls.qsize(),
            )

    def close(self) -> None:
        """Wait until all calls are made, for FINISH_SECONDS at most."""
        if self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "tracker %s did not finish within %.0f s: up to %d calls are lost",
                self.name,
                FINISH_SECONDS,
                self._calls.qsize(),
            )

    def _serve(self, make: Callable[[], Tracker], started: "Future[Tracker]") -> None:
        _construct(make, started)
        while not started.exception() and (call := self._calls.get()) is not None:
            self._since = time.monotonic()
            self._make(call)
            self._since = None

    def _make(self, call: Callable[[Tracker], None]) -> None:
        try:
            call(self.tracker)
        except BaseException as error:  # including SystemExit: a tracker must not end the run
            if _is_user_interrupt(error):
                raise
            self.failures += 1
            if self.failures == 1:
                logger.warning(
                    "tracker %s failed (%s: %s); training continues, further failures are counted",
                    self.name,
                    type(error).__name__,
                    error,
                    exc_info=not isinstance(error, OSError),  # the stack of a disk or network error does not help
                )


def _is_user_interrupt(error: BaseException) -> bool:
    """Whether an error is Ctrl-C, which Python delivers to the main thread only."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _construct(make: Callable[[], Tracker], started: "Future[Tracker]") -> None:
    try:
        started.set_result(make())
    except BaseException as error:
        if _is_user_interrupt(error):
            raise
        started.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


class Tracking:
    """The trackers of one run.

        with Tracking(["console", "jsonl"], "project", "run-1", config, "checkpoints/run-1") as tracking:
            tracking.log({"critic/score/mean": 0.5}, step=1)

    A resumed run continues the same tracker run. jsonl and tensorboard drop the steps after the checkpoint; wandb,
    mlflow and swanlab cannot delete them and log them twice.

    Args:
        backends: names of TRACKER_REGISTRY.
        config: flat config to record.
        default_local_dir: folder for local files.
        resume_step: step of the checkpoint that the run resumes from; 0 for a new run.
        progress: the display that the tracker `console` updates; None: it logs one line per step.

    Raises:
        ValueError: if a tracker is unknown, its package is missing, or it cannot start.
    """

    def __init__(
        self,
        backends: str | Sequence[str],
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        default_local_dir: str | Path,
        resume_step: int = 0,
        progress: TrainingProgress | None = None,
    ):
        names = [backends] if isinstance(backends, str) else list(backends)
        check_trackers(names)
        names = list({TRACKER_REGISTRY[name]: name for name in names}.values())  # a tracker with two names runs once
        folder = Path(default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(project_name, experiment_name, config, folder, resume_step, progress)
        self._finished = False
        self._callers = [
            _Caller(name, partial(TRACKER_REGISTRY[name], run), TRACKER_REGISTRY[name].background) for name in names
        ]
        self.not_finite: Counter[str] = Counter()  # metric -> steps with NaN or infinity

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step. Raises ValueError if a value is not a number."""
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[_utf8(name)] = float(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"metric {name!r}: expected a number, found {value!r}") from error
        for name, number in numbers.items():
            if not math.isfinite(number):
                if name not in self.not_finite:
                    logger.error("step %d: %s is %s", step, name, number)
                self.not_finite[name] += 1
        for caller in self._callers:
            caller.call(lambda tracker: tracker.log(dict(numbers), step))

    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        """Log a table of samples: a list of rows with equal keys."""
        if rows:
            texts = [{_utf8(key): _utf8(value) for key, value in row.items()} for row in rows]
            for caller in self._callers:
                caller.call(lambda tracker: tracker.log_samples(_utf8(name), [dict(row) for row in texts], step))

    def finish(self, failed: bool = False) -> None:
        """Close the trackers and log a summary of their failures."""
        if self._finished:
            return
        self._finished = True
        for caller in self._callers:
            caller.call(lambda tracker: tracker.finish(failed))
        for caller in self._callers:
            caller.close()
        for name, count in self.failures.items():
            logger.warning("tracker %s: %d calls failed", name, count)
        for name, count in self.not_finite.items():
            logger.error("%s was not finite in %d steps", name, count)

    @property
    def failures(self) -> dict[str, int]:
        """Failed calls of each tracker that has any."""
        return {caller.name: caller.failures for caller in self._callers if caller.failures}

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self.finish(failed=error_type is not None)


def _utf8(value: Any) -> Any:
    """A text without lone surrogates, which the services refuse; other values as they are."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
