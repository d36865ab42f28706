"""Reads the folders of runs: names, configuration, state and metrics; and the JSONL files in them."""

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import psutil

from verl.checkpoints.atomic import atomic_write
from verl.tracking.formatting import Series
from verl.utils.paths import resolved


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; none if there is no file. NaN and Infinity are None. Damaged lines, as of a killed
    process, are skipped."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                item = json.loads(line, parse_constant=lambda name: None)
            except (ValueError, RecursionError):
                continue
            if isinstance(item, dict):
                yield item


def json_line(item: Mapping[str, Any]) -> str:
    """A line of a JSONL file. A lone surrogate, which UTF-8 does not have, is an escape of JSON."""
    line = json.dumps(item, ensure_ascii=False, default=str) + "\n"
    return line.encode("utf-8", "backslashreplace").decode()


def append_line(path: Path, item: Mapping[str, Any]) -> None:
    """Append an object to a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json_line(item))


def write_lines(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file, or replace it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        draft.write_text("".join(map(json_line, items)), encoding="utf-8")


def open_steps(path: Path, resume_step: int, is_complete: bool = False) -> TextIO:
    """Open a JSONL file to append to it, without the lines of steps after `resume_step`.

    These lines, and those that are damaged, are moved to `<name>.dropped.jsonl`.

    Args:
        resume_step: 0: a run from the beginning, which writes step 0 (its first validation) too, so no line is kept.
        is_complete: whether every step has a line; a file that ends before `resume_step` is logged as a warning.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    steps = [_read_step(line) for line in lines]
    kept = [step is not None and resume_step > 0 and step <= resume_step for step in steps]
    if not all(kept):
        aside = path.with_suffix(".dropped.jsonl")
        with aside.open("ab") as file:
            dropped = (line for line, keep in zip(lines, kept) if not keep)
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in dropped)
        with atomic_write(path) as draft:
            draft.write_bytes(b"".join(line for line, keep in zip(lines, kept) if keep))
        if damaged := steps.count(None):
            logger.warning("%s: %d damaged lines were moved to %s", path, damaged, aside.name)
        if later := len(lines) - sum(kept) - damaged:
            which = f"after step {resume_step}" if resume_step else "of an earlier start"
            logger.info("%s: moved %d lines %s to %s", path, later, which, aside.name)
    last = max((step for step, keep in zip(steps, kept) if keep), default=0)
    if is_complete and lines and last < resume_step:
        logger.warning("%s ends at step %d: the steps up to %d are missing", path, last, resume_step)
    return path.open("a", encoding="utf-8")


def _read_step(line: bytes) -> int | None:
    """The step of a line; None if it is damaged, such as the partial last line of a process that was killed."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or no UTF-8
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int and step >= 0 and line.endswith(b"\n") else None


logger = logging.getLogger(__name__)

#: names, which differ between any two runs
_NAMES = {"trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir", "trainer.run_id"}
#: metrics of the training reward or loss, of which the first one present is shown
LOSSES = ("train/nll", "train/loss")
REWARDS = ("critic/score/mean", "critic/rewards/mean", *LOSSES)
#: keys that name the algorithm, and the model, of a run
_ALGORITHM = ("algorithm.name", "algorithm.adv_estimator")
_MODEL = ("actor_rollout_ref.model.path", "model.path")
#: levels of subfolders that are searched for runs
_DEPTH = 4
#: keys of the sampling of validation responses
_GREEDY = ("actor_rollout_ref.rollout.val_kwargs.do_sample", "actor_rollout_ref.rollout.val_kwargs.temperature")


def read_metrics(metrics_jsonl: str | Path) -> dict[str, Series]:
    """Name -> [(step, value)], sorted by step. Values that are not finite numbers, and lines without the number of a
    step, are skipped."""
    path = Path(metrics_jsonl)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: expected the file that the tracker jsonl writes (trainer.logger)")
    metrics: dict[str, list[tuple[int, float]]] = {}
    for record in read_lines(path):
        step = record.pop("step", None)
        record.pop("time", None)
        for name, value in record.items() if isinstance(step, int) else ():
            if isinstance(value, int | float) and abs(value) <= sys.float_info.max:  # false for NaN
                metrics.setdefault(name, []).append((step, value))
    return {name: sorted(series, key=lambda point: point[0]) for name, series in metrics.items()}


@dataclass(frozen=True)
class RecordedRun:
    """A run in its folder.

    Attributes:
        folder: trainer.default_local_dir of the run.
        about: content of run.json; empty for a run that has none.
    """

    folder: Path
    about: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """Name -> [(step, value)]; empty if there is no metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.is_file() else {}

    @property
    def config(self) -> Mapping[str, Any]:
        """Dotted key -> value."""
        return self.about.get("config", {})

    @property
    def name(self) -> str:
        """Folder name."""
        return self.folder.name or str(self.folder)

    @property
    def algorithm(self) -> str:
        """Name of the algorithm: `grpo`, `sft`, ..."""
        algorithm = next((self.config[key] for key in _ALGORITHM if self.config.get(key)), None)
        return str(algorithm or ("sft" if "model.path" in self.config else "unknown"))

    @property
    def model_path(self) -> str:
        """Path or Hub id of the model before training."""
        return str(next((self.config[key] for key in _MODEL if self.config.get(key)), "unknown"))

    @property
    def model(self) -> str:
        """Last part of the model's path."""
        path = self.model_path
        parts = [part for part in Path(path).parts if not part.startswith("global_step_")]
        kept = [part for part in parts if part not in ("actor", "huggingface", "model", "/")]
        return kept[-1] if kept else path

    @property
    def state(self) -> str:
        """running, finished, interrupted or failed; `killed` if its process ended without writing one of these."""
        state = str(self.about.get("state", "unknown"))
        pid, started = self.about.get("pid"), self.about.get("started")
        if state == "running" and self.about.get("host") == socket.gethostname() and pid and started:
            try:
                return state if psutil.Process(pid).create_time() < started + 1 else "killed"
            except psutil.NoSuchProcess:
                return "killed"
        return state

    @property
    def steps(self) -> int:
        """Number of the last step with metrics."""
        return max((series[-1][0] for series in self.metrics.values()), default=0)

    @property
    def age(self) -> float:
        """Seconds since the run last wrote."""
        return time.time() - _last_write(self.folder)

    @property
    def seconds(self) -> float:
        """Seconds of all steps and validations."""
        names = ("timing_s/step", "timing_s/testing")
        return sum(value for name in names for _, value in self.metrics.get(name, ()))

    @property
    def reward_name(self) -> str | None:
        """The metric of the training reward; of the loss in SFT."""
        return next((name for name in REWARDS if name in self.metrics), None)

    @property
    def validation_names(self) -> list[str]:
        """Validation metrics, the main ones first; of a core metric with several samples, only the mean."""
        core = sorted(name for name in self.metrics if name.startswith("val-core/") and "/mean@" in name)
        return core or sorted(name for name in self.metrics if name.startswith(("val-core/", "val/")))

    def validation_label(self, name: str) -> str:
        """`validation (greedy)`, followed by the metric if there are several."""
        sampling = ""
        if _GREEDY[0] in self.config:
            sampled = self.config[_GREEDY[0]] and self.config.get(_GREEDY[1]) != 0
            sampling = " (sampled)" if sampled else " (greedy)"
        label = f"validation{sampling}" if name.startswith("val-core/") else "validation"
        return label if len(self.validation_names) == 1 else f"{label}: {name.split('/', 1)[1]}"

    @property
    def title(self) -> str:
        """Name, algorithm, model and learning rate."""
        keys = ("actor_rollout_ref.actor.optim.lr", "optim.lr")
        rate = next((f"lr {self.config[key]:g}" for key in keys if key in self.config), None)
        parts = dict.fromkeys((self.name, self.algorithm, self.model, rate))  # a folder is often called `grpo`
        return " · ".join(part for part in parts if part and part != "unknown")


def open_run(folder: str | Path) -> RecordedRun:
    """Read a run. If run.json cannot be read, a warning is logged, and names and settings are unknown. Raises
    ValueError if the folder has neither run.json nor metrics.jsonl."""
    folder = Path(folder)
    if not (folder / "run.json").is_file() and not (folder / "metrics.jsonl").is_file():
        runs = run_folders(folder)
        hint = f"; it has the runs {', '.join(map(str, runs[:5]))}" if runs else ""
        raise ValueError(
            f"{folder} is not the folder of a run (trainer.default_local_dir): it has no run.json or metrics.jsonl"
            f"{hint}"
        )
    return RecordedRun(folder, read_about(folder))


def read_about(folder: Path) -> dict[str, Any]:
    """The content of a run's run.json; empty if there is none, and with a warning if it cannot be read."""
    path = folder / "run.json"
    if not path.is_file():
        return {}
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(about, dict):
            raise ValueError(f"expected an object, found {type(about).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): names, state and settings of the run are unknown", path, error)
        return {}
    for name in ("config", "changed"):
        if not isinstance(about.get(name), dict):
            about[name] = {}
    return about


def run_folders(folder: str | Path) -> list[Path]:
    """The folders of the runs in a folder and its subfolders, the newest first. Reads no file."""
    return sorted(_search(Path(folder)) if Path(folder).is_dir() else (), key=_last_write, reverse=True)


def _last_write(folder: Path) -> float:
    files = [folder / name for name in ("metrics.jsonl", "run.json")]
    return max((path.stat().st_mtime for path in files if path.is_file()), default=time.time())


def _search(folder: Path) -> Iterator[Path]:
    """The runs in a folder. One that may not be read is logged as a warning."""

    def skip(error: OSError) -> None:
        logger.warning("%s is not searched: %s", error.filename, error)

    for path, folders, files in os.walk(folder, onerror=skip, followlinks=True):
        if {"run.json", "metrics.jsonl"} & {*files}:
            yield Path(path)
        is_deepest = len(Path(path).relative_to(folder).parts) == _DEPTH
        folders[:] = [name for name in folders if not (is_deepest or name.startswith((".", "global_step_")))]


def differing_settings(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Key -> the value in each run, for the settings that differ. None: the run has no such key. If every run has
    recorded its changed keys, only these count: a default that follows from another setting is not a setting of the
    user."""
    is_known = all(run.about.get("changed") for run in runs)
    keys = dict.fromkeys(key for run in runs for key in (run.about["changed"] if is_known else run.config))
    table = {key: [run.config.get(key) for run in runs] for key in keys if key not in _NAMES}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def labels(runs: Sequence[RecordedRun]) -> list[str]:
    """A short label of each run: what differs between the configurations, otherwise the names."""
    names = short_names(runs)
    different = {key: values for key, values in differing_settings(runs).items() if not _is_path(values)}
    # settings such as trainer.save_freq do not change what is learned
    different = {key: different[key] for key in different if not key.startswith("trainer.")} or different
    if not different or len(different) > 3 or any(not run.config for run in runs):
        return names
    short_keys = {key: key.rpartition(".")[2] for key in different}
    texts = [", ".join(f"{short_keys[key]}={different[key][i]}" for key in different) for i in range(len(runs))]
    return texts if len(set(texts)) == len(runs) else [f"{name}: {text}" for name, text in zip(names, texts)]


def short_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Last parts of the folders, as many as tell them apart."""
    parts = [resolved(run.folder).parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.folder) for run in runs]


def _is_path(values: Sequence[Any]) -> bool:
    texts = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return any(isinstance(text, str) and "/" in text for text in texts)
