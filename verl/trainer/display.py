"""Console output of a run: a panel or one line per step, warnings about divergence, and a summary at the end."""

import importlib.util
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from verl.protocol import DataProto
from verl.tracking.console import TrainingProgress
from verl.tracking.curves import save_curves
from verl.tracking.summary import summary_lines
from verl.trainer.divergence import DivergenceWatch
from verl.utils import log

if TYPE_CHECKING:
    from verl.trainer.base import Trainer

logger = logging.getLogger("verl.trainer")

#: seconds between two choices of samples for the panel
_SAMPLE_SECONDS = 3.0
_SAMPLES = 2
_JSONL = {"jsonl", "file"}


class RunDisplay:
    """Context manager around the steps of a run. The tracker `console` turns on all but the warnings."""

    def __init__(self, trainer: "Trainer"):
        self._trainer = trainer
        self._trackers = set(trainer.config.trainer.logger)
        self._watch = DivergenceWatch(prompts=None if trainer.val_dataset is None else len(trainer.val_dataset))
        self._start = time.monotonic()
        self._sampled = 0.0
        #: shows the steps; None without the tracker `console`
        self.progress: TrainingProgress | None = None
        if "console" in self._trackers:
            run = trainer.config.trainer
            self.progress = TrainingProgress(
                trainer.total_steps,
                f"{run.project_name}/{run.experiment_name}",
                print_every=1,
                quiet=False,
                details=False,
                running=trainer.running_operators,
            )

    def show_samples(self, batch: DataProto) -> None:
        """Show samples of a batch in the panel, if it is time for others."""
        if self.progress is None or not self.progress.is_live or time.monotonic() - self._sampled < _SAMPLE_SECONDS:
            return
        self._sampled = time.monotonic()
        rows = self._trainer.draw_samples(batch, _SAMPLES)
        self.progress.show_samples([(row["input"], row["output"], row["score"]) for row in rows])

    def watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of divergence."""
        for line in self._watch.update(step, metrics):
            logger.warning("%s", line)

    def __enter__(self) -> "RunDisplay":
        if self.progress is not None:
            self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.progress is None:
            return
        self.progress.__exit__(kind, error, trace)
        if kind is None or issubclass(kind, KeyboardInterrupt):
            for line in self.summary():
                log.steps.info("%s", line)

    def summary(self) -> list[str]:
        """Lines with the results so far, the paths of the run, and the next command."""
        trainer, history = self._trainer, self._watch.history
        seconds = time.monotonic() - self._start
        lines = summary_lines(history, trainer.global_step, trainer.total_steps, seconds)
        return [*lines, *self._results()] if lines else []

    def _results(self) -> list[str]:
        """Paths of the run, one per line, and what to do with the model."""
        lines, folder = [], _shown(self._trainer.folder)
        saved = self._trainer.checkpoints.newest()
        model = None if saved is None else saved / "actor" / "huggingface"
        if model is not None and any(model.glob("*.safetensors")):
            lines.append(f"model:   {_shown(model)}")
            lines.append(f"next:    verl generate model.path={_shown(model)} {self._data()}")
        elif saved is not None:
            lines.append(f"checkpoint: {_shown(saved)}")
            lines.append(
                f"next:    verl merge --local_dir {_shown(saved / 'actor')} --target_dir {_shown(saved / 'merged')}"
            )
        if self._trackers & _JSONL:
            lines.insert(min(1, len(lines)), f"metrics: {folder / 'metrics.jsonl'}{self._curves()}")
            lines.append(f"         verl report {folder}")
        return lines

    def _data(self) -> str:
        """Keys of `verl generate` for the data of this run."""
        data = self._trainer.config.data
        files = data.val_files or data.train_files
        return f"data.path={_shown(Path(files[0]))} data.output_path=responses.parquet" if files else ""

    def _curves(self) -> str:
        """Plot the learning curves, if matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return ""
        try:
            path = save_curves(self._trainer.folder / "metrics.jsonl", self._trainer.folder / "curves.png")
        except ValueError as error:  # a custom flow without the metrics that are plotted
            logger.debug("no curves: %s", error)
            return ""
        return f", {path.name}"


def _shown(path: Path) -> Path:
    """A path as the user would type it: relative to the working directory, if it is below."""
    path, here = Path(path), Path.cwd()
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path
