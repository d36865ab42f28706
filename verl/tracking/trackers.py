"""Trackers: one class per destination of metrics, with the methods log, log_samples and finish."""

import base64
import importlib
import io
import json
import logging
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from verl.tracking.console import TrainingProgress
from verl.tracking.formatting import format_headline, format_line, format_number
from verl.tracking.runs import json_line, open_steps
from verl.utils.log import setup_logging
from verl.utils.paths import resolved
from verl.utils.redaction import printable

MAX_IMAGES = 4
"""Images of a sample that are shown."""
SIDE = 128
"""Pixels of the longer side of a thumbnail."""
_PREFIX = "data:image/"


def thumbnails(data: Mapping[str, Any] | None) -> list[str]:
    """Data URIs of the first images of a prompt, or of the first frames of its videos; of a few kB each. data: an entry
    of the column multi_modal_data; None in a text-only row."""
    from PIL import Image

    videos = (video[0] if isinstance(video, tuple) else video for video in (data or {}).get("videos", ()))
    images = [*(data or {}).get("images", ()), *(Image.fromarray(frames[0]) for frames in videos)]
    return [thumbnail(image) for image in images[:MAX_IMAGES]]


def thumbnail(image: Any) -> str:
    """A data URI of a PIL image: PNG if that is small, otherwise JPEG."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    buffers = {image_format: io.BytesIO() for image_format in ("png", "jpeg")}
    small.save(buffers["png"], "PNG")
    small.save(buffers["jpeg"], "JPEG", quality=80)
    image_format = "png" if buffers["png"].tell() <= max(2048, buffers["jpeg"].tell()) else "jpeg"
    return f"{_PREFIX}{image_format};base64,{base64.b64encode(buffers[image_format].getvalue()).decode()}"


def first_image(value: Any) -> Any:
    """The PIL image of the first of a list of thumbnails; None for any other value."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(value[0].partition(",")[2]))) if _are_thumbnails(value) else None


logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """The tracked run.

    Attributes:
        config: flat: key.with.dots -> value.
        resume_step: step of the checkpoint it resumes from, 0 for a new run.
        progress: the display of a trainer, which the tracker `console` updates.
    """

    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    folder: Path
    resume_step: int = 0
    progress: TrainingProgress | None = None

    def tracker_id(self, tracker: str, make: Callable[[], str]) -> str:
        """The id of this run in a service: the one it had before the resume, otherwise a new one. It is saved next to
        the checkpoints, for the next resume."""
        file = self.folder / "tracker_ids.json"
        ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not self.resume_step or tracker not in ids:
            ids[tracker] = make()
            file.write_text(json.dumps(ids), encoding="utf-8")
        return ids[tracker]


class Tracker(ABC):
    """A destination of metrics. Created once per run, in the controller process."""

    #: package that must be installed; None if there is none
    package: ClassVar[str | None] = None
    #: whether it is called in a separate thread, so that a slow or hanging service does not delay training
    background: ClassVar[bool] = True

    def __init__(self, run: Run):
        self.run = run

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step. One step may have several calls, with different metrics."""

    @abstractmethod
    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        """Log a table of samples, with equal keys in every row."""

    @abstractmethod
    def finish(self, failed: bool) -> None:
        """Flush and close. `failed`: the run ended with an error."""


class ConsoleTracker(Tracker):
    """The display of a trainer (`TrainingProgress`); without one, a log line per step with the headline metrics."""

    background = False

    def __init__(self, run: Run):
        super().__init__(run)
        setup_logging()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.run.progress is not None:
            show = self.run.progress.update if "timing_s/step" in metrics else self.run.progress.validated
            show(step, metrics)
            return
        values = [f"{label} {text}" for label, text in format_headline(metrics).items()]
        logger.info(" | ".join([f"step {step}", *values]))

    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        format_text = printable if self.run.progress is not None and self.run.progress.is_live else format_line
        for i, row in enumerate(rows, 1):
            cells = {key: _cell(value) for key, value in row.items()}
            texts = {k: format_number(v) if isinstance(v, float) else format_text(str(v)) for k, v in cells.items()}
            lines = [f"  {key}: {text}".replace("\n", "\n    ") for key, text in texts.items()]
            logger.info("step %d, %s %d of %d\n%s", step, name, i, len(rows), "\n".join(lines))

    def finish(self, failed: bool) -> None:
        pass


class JsonlTracker(Tracker):
    """`metrics.jsonl`: one JSON object per call with "step", "time" and the metrics; samples in `samples.jsonl`.

    A run that resumes from step N moves the lines after N, and those that are damaged, to `metrics.dropped.jsonl`,
    since it will write these steps again. Values that are not finite are written as null.
    """

    background = False

    def __init__(self, run: Run):
        super().__init__(run)
        self._files = {
            name: open_steps(run.folder / f"{name}.jsonl", run.resume_step, is_complete=name == "metrics")
            for name in ("metrics", "samples")
        }

    def _write(self, name: str, record: dict[str, Any]) -> None:
        file = self._files[name]
        file.write(json_line(record))
        file.flush()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._write("metrics", {"step": step, "time": time.time(), **values})

    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        self._write("samples", {"step": step, "name": name, "rows": [dict(row) for row in rows]})

    def finish(self, failed: bool) -> None:
        for file in self._files.values():
            file.close()


class TensorboardTracker(Tracker):
    """Event files in `tensorboard/`. A resumed run purges the steps after its checkpoint."""

    package = "tensorboard"
    background = False

    def __init__(self, run: Run):
        super().__init__(run)
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        first = run.resume_step + 1 if run.resume_step else 0
        self._writer = writer(str(run.folder / "tensorboard"), purge_step=first)
        self._writer.add_text("config", _markdown([{"key": k, "value": v} for k, v in run.config.items()]), first)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        self._writer.add_text(name, _markdown(rows), step)
        for number, row in enumerate(rows):
            if (image := first_image(row.get("images"))) is not None:
                self._writer.add_image(f"{name}/{number}", np.asarray(image), step, dataformats="HWC")

    def finish(self, failed: bool) -> None:
        self._writer.close()


def _init_arguments(run: Run, tracker: str, id_bytes: int) -> dict[str, Any]:
    """Arguments of a service's `init`, with the id under which a resumed run continues."""
    return {
        "project": run.project_name,
        "name": run.experiment_name,
        "id": run.tracker_id(tracker, partial(secrets.token_hex, id_bytes)),
        "resume": "allow",
        "config": dict(run.config),
    }


class WandbTracker(Tracker):
    """Weights & Biases; WANDB_MODE=offline logs locally. A resumed run continues the same wandb run.

    The step counter of wandb cannot go back to the step of a checkpoint, so the step is logged as the x-axis metric.
    """

    package = "wandb"

    def __init__(self, run: Run):
        super().__init__(run)
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(**_init_arguments(run, "wandb", 4), dir=str(run.folder))
        self._run.define_metric("training/global_step")
        self._run.define_metric("*", step_metric="training/global_step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "training/global_step": step})

    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=[[self._cell(row[c]) for c in columns] for row in rows])
        self._run.log({name: table, "training/global_step": step})

    def _cell(self, value: Any) -> Any:
        """An image, or None for an empty list of them: a column of wandb has one type."""
        image = first_image(value)
        return self._wandb.Image(image) if image is not None else None if value == [] else _cell(value)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


#: limits of MLflow
_PARAM_LENGTH, _PARAMS_PER_CALL = 6000, 100


class MlflowTracker(Tracker):
    """MLflow: at MLFLOW_TRACKING_URI, or in `mlflow.db` next to the run's folder, which the runs of a project share.

    The settings are parameters. A resumed run continues the same run; its parameters stay those of the first start.
    """

    package = "mlflow"

    def __init__(self, run: Run):
        super().__init__(run)
        mlflow = importlib.import_module("mlflow")
        self._metric, self._param = mlflow.entities.Metric, mlflow.entities.Param
        address = mlflow.environment_variables.MLFLOW_TRACKING_URI.get()
        project = resolved(run.folder).parent
        self._client = mlflow.MlflowClient(address or f"sqlite:///{project / 'mlflow.db'}")
        artifacts = None if address else (project / "mlflow").as_uri()
        self._id = run.tracker_id("mlflow", partial(self._new_run, artifacts))
        self._client.update_run(self._id, status="RUNNING")
        self._client.log_dict(self._id, dict(run.config), "config.json")
        known = self._client.get_run(self._id).data.params  # a parameter cannot be changed
        params = [self._param(k, str(v)[:_PARAM_LENGTH]) for k, v in run.config.items() if k not in known]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[start : start + _PARAMS_PER_CALL])

    def _new_run(self, artifact_location: str | None) -> str:
        experiment = self._client.get_experiment_by_name(self.run.project_name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(self.run.project_name, artifact_location=artifact_location)
        return self._client.create_run(experiment_id, run_name=self.run.experiment_name).info.run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        # "@" is not allowed in a name: val-core/gsm8k/acc/mean@8 becomes .../mean_at_8
        entries = [self._metric(name.replace("@", "_at_"), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=entries)

    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        table = {column: [_cell(row[column]) for row in rows] for column in rows[0]}
        self._client.log_table(self._id, table, f"{name}/step_{step}.json")

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


class SwanlabTracker(Tracker):
    """SwanLab; SWANLAB_MODE=offline or local logs locally. A resumed run continues the same SwanLab run."""

    package = "swanlab"

    def __init__(self, run: Run):
        super().__init__(run)
        self._swanlab = importlib.import_module("swanlab")
        self._run = self._swanlab.init(**_init_arguments(run, "swanlab", 8), log_dir=str(run.folder / "swanlab"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: Rows, step: int) -> None:
        table = self._swanlab.echarts.Table()
        table.add(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success")


def _are_thumbnails(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(str(item).startswith(_PREFIX) for item in value)


def _cell(value: Any) -> str | float:
    """The value of a table cell: a number as it is, the number of thumbnails, anything else as text."""
    if _are_thumbnails(value):
        return f"{len(value)} images"
    return value if isinstance(value, int | float) else str(value)


def _markdown(rows: Rows) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([str(_cell(row[c])) for c in columns] for row in rows)]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |" for line in lines)


#: The values of `trainer.logger`. Add a custom tracker with `TRACKER_REGISTRY["mine"] = MyTracker`.
TRACKER_REGISTRY: dict[str, type[Tracker]] = {
    "console": ConsoleTracker,
    "jsonl": JsonlTracker,
    "file": JsonlTracker,  # the name in scripts of public verl
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
}
