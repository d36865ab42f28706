"""Output of a run: the display, the trackers, and the record for `verl runs` and `verl report`."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from verl.config import differences, to_flat_dict
from verl.config.fields import Schema
from verl.tracking.run_record import RunRecord
from verl.tracking.runs import read_about
from verl.tracking.tracking import Tracking
from verl.trainer.output.display import RunDisplay
from verl.utils.redaction import redacted

if TYPE_CHECKING:
    from verl.trainer.base import StepReport, Trainer

logger = logging.getLogger("verl.trainer")


def run_record(
    folder: Path,
    config: Schema,
    total_steps: int,
    warnings: Sequence[logging.LogRecord] = (),
    step: Callable[[], int] | None = None,
    is_new: bool = True,
) -> RunRecord:
    """The record of a run with these settings. warnings: of the checks before the run. Others: as in `RunRecord`."""
    trainer, flat, defaults = config.trainer, redacted(to_flat_dict(config)), to_flat_dict(type(config)())
    about = {
        "project": trainer.project_name,
        "experiment": trainer.experiment_name,
        "total_steps": total_steps,
        "config": flat,
        "changed": {key: {"value": flat[key], "default": defaults[key]} for key in differences(config)},
    }
    return RunRecord(folder, about, warnings, step, is_new)


def warn_nothing_to_train(trainer: "Trainer") -> None:
    """Log why a run that resumes at its end has no further steps, and how to continue."""
    if trainer.global_step < trainer.total_steps:
        logger.warning(
            "nothing to train: the run ended at step %d of %d, because %s. To continue, raise "
            "trainer.early_stopping.patience, or set it to null",
            *(trainer.global_step, trainer.total_steps, trainer.end_reason),
        )
    else:
        logger.warning(
            "nothing to train: the checkpoint is at step %d and the run ends at step %d. To continue, raise "
            "trainer.total_training_steps or trainer.total_epochs; to start a fresh run, set a new "
            "trainer.experiment_name or trainer.default_local_dir (now %s)",
            *(trainer.global_step, trainer.total_steps, trainer.checkpoints.root),
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
    """Context manager around a run, from before its workers start."""

    def __init__(self, trainer: "Trainer"):
        self._trainer = trainer
        self._folder = record_folder(trainer.folder, trainer.config.trainer.val_only)
        self._record = run_record(
            self._folder,
            trainer.config,
            trainer.total_steps,
            trainer.run.warnings,
            lambda: trainer.global_step,
            is_new=not trainer.run.is_recorded,
        )
        self._display: RunDisplay
        self._tracking: Tracking

    def __enter__(self) -> "RunLog":
        self._record.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._record.__exit__(kind, error, trace)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Context of the steps, after the checkpoint is loaded."""
        trainer, settings = self._trainer, self._trainer.config.trainer
        resumed = trainer.global_step if self._folder == trainer.folder else 0
        self._record.resume(resumed)
        trainer.run.is_recorded = True
        with RunDisplay(trainer, self._folder) as self._display:
            self._tracking = Tracking(
                settings.logger,
                settings.project_name,
                settings.experiment_name,
                config=redacted(to_flat_dict(trainer.config)),
                default_local_dir=self._folder,
                resume_step=resumed,
                progress=self._display.progress,
                changed=list(differences(trainer.config)),
            )
            with self._tracking:
                yield

    def step(self, report: "StepReport") -> None:
        """Log a step."""
        trainer, step = self._trainer, report.step
        self._display.show_samples(report.batch)
        self._tracking.log(report.metrics, step)
        self._display.watch(step, report.metrics)
        self._tracking.log_samples("train/generations", trainer.step_samples(report.batch), step)
        self._record.add_step(step, lambda: trainer.step_record(report.batch), step == trainer.total_steps)

    def validation(self, metrics: dict[str, float]) -> None:
        """Log a validation."""
        trainer, step = self._trainer, self._trainer.global_step
        self._tracking.log(metrics, step)
        self._display.watch(step, metrics)
        self._tracking.log_samples("val/generations", trainer.validation_samples(), step)
