"""Output of a run: the display, the trackers, and the record for `verl runs` and `verl report`."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.config import differences, to_flat_dict
from verl.protocol import DataProto
from verl.tracking.console import TrainingProgress
from verl.tracking.run_record import RunRecord
from verl.tracking.runs import read_about
from verl.tracking.trackers import Rows
from verl.tracking.tracking import Tracking
from verl.trainer.guards.interruption import Stopped
from verl.trainer.output.divergence import DivergenceWatch
from verl.trainer.output.summary import run_summary
from verl.trainer.view import RunView, StepReport
from verl.utils import log
from verl.utils.redaction import redacted

logger = logging.getLogger("verl.trainer")

#: seconds between two choices of samples for the panel
_SAMPLE_SECONDS = 3.0
_SAMPLES = 2


def warn_nothing_to_train(view: RunView) -> None:
    """Log why a run that resumes at its end has no further steps, and how to continue."""
    if view.step < view.total_steps:
        logger.warning(
            "nothing to train: the run ended at step %d of %d, because %s. To continue, raise "
            "trainer.early_stopping.patience, or set it to null",
            *(view.step, view.total_steps, view.end_reason),
        )
    else:
        logger.warning(
            "nothing to train: the checkpoint is at step %d and the run ends at step %d. To continue, raise "
            "trainer.total_training_steps or trainer.total_epochs; to start a fresh run, set a new "
            "trainer.experiment_name or trainer.default_local_dir (now %s)",
            *(view.step, view.total_steps, view.folder),
        )


#: subfolder for the record of `trainer.val_only=true` in the folder of a training run
VAL_ONLY = "val_only"


def record_folder(folder: Path, val_only: bool) -> Path:
    """The folder of the record of a run in `folder`.

    A validation is no step of a training run: with `trainer.val_only`, the record of a training run in this folder is
    kept, and that of the validation is in a subfolder.
    """
    if not val_only or not any((folder / name).is_file() for name in ("run.json", "metrics.jsonl")):
        return folder
    is_validation = read_about(folder).get("config", {}).get("trainer.val_only") is True
    return folder if is_validation else folder / VAL_ONLY


class RunLog:
    """Context manager around a run, from before its workers start. The tracker `console` adds a panel and a summary.

    Args:
        draw: (batch, count) -> samples of a batch, as rows of a table.
        record: batch -> what `verl report` shows of it.
    """

    def __init__(
        self,
        view: RunView,
        draw: Callable[[DataProto, int], Rows],
        record: Callable[[DataProto], Mapping[str, Any]],
    ):
        self._view, self._draw, self._make_record = view, draw, record
        self._settings = trainer = view.config.trainer
        self._folder = record_folder(view.folder, trainer.val_only)
        self._flat, defaults = redacted(to_flat_dict(view.config)), to_flat_dict(type(view.config)())
        self._changed = list(differences(view.config))
        about = {
            "project": trainer.project_name,
            "experiment": trainer.experiment_name,
            "total_steps": view.total_steps,
            "config": self._flat,
            "changed": {key: {"value": self._flat[key], "default": defaults[key]} for key in self._changed},
        }
        is_new = not view.run.is_recorded
        self._record = RunRecord(self._folder, about, view.run.warnings, lambda: view.step, is_new)
        dataset = view.run.inputs.val_dataset
        self._divergence = DivergenceWatch(prompts=None if dataset is None else len(dataset))
        self._count = self._settings.get("log_samples", 0)  # not in SFT
        self._sampled_at = 0.0  # when the panel got its samples
        self._progress: TrainingProgress | None = None
        self._tracking: Tracking

    def __enter__(self) -> "RunLog":
        self._record.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._record.__exit__(kind, error, trace)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Context of the steps, after the checkpoint is loaded."""
        view, settings, start = self._view, self._settings, time.monotonic()
        resumed = view.step  # 0: the run has not been resumed
        recorded = resumed if self._folder == view.folder else 0
        self._record.resume(recorded)
        view.run.is_recorded = True
        if "console" in settings.logger:
            title = f"{settings.project_name}/{settings.experiment_name}"
            running = view.running_operators
            self._progress = TrainingProgress(
                view.total_steps, title, print_every=1, quiet=False, details=False, running=running
            )
        try:
            with self._progress or nullcontext():
                self._tracking = Tracking(
                    settings.logger,
                    settings.project_name,
                    settings.experiment_name,
                    config=self._flat,
                    default_local_dir=self._folder,
                    resume_step=recorded,
                    progress=self._progress,
                    changed=self._changed,
                )
                with self._tracking:
                    yield
        except KeyboardInterrupt as stop:
            if not isinstance(stop, Stopped) or stop.finished:  # not at once: plotting takes seconds
                self._summarize(resumed, start)
            raise
        self._summarize(resumed, start)

    def _summarize(self, resumed: int, start: float) -> None:
        if self._progress is not None:
            seconds = time.monotonic() - start
            for line in run_summary(self._view, self._folder, self._divergence.history, resumed, seconds):
                log.steps.info("%s", line)

    def step(self, report: StepReport) -> None:
        """Log a step."""
        batch, step = report.batch, report.step
        progress, now = self._progress, time.monotonic()
        if progress is not None and progress.is_live and now - self._sampled_at >= _SAMPLE_SECONDS:
            self._sampled_at = now
            progress.show_samples([(row["input"], row["output"], row["score"]) for row in self._draw(batch, _SAMPLES)])
        self._log(step, report.metrics)
        if self._count:
            self._tracking.log_samples("train/generations", self._draw(batch, self._count), step)
        self._record.add_step(step, lambda: self._make_record(batch), step == self._view.total_steps)

    def validation(self, metrics: Mapping[str, float], samples: Rows) -> None:
        """Log a validation."""
        self._log(self._view.step, metrics)
        self._tracking.log_samples("val/generations", samples, self._view.step)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracking.log(metrics, step)
        for line in self._divergence.update(step, metrics):
            logger.warning("%s", line)
