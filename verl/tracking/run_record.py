"""The record of a run in its folder, which `verl runs` and `verl report` read.

- `run.json`: names, state, configuration, and the settings that differ from the defaults.
- `warnings.jsonl`: log messages of level WARNING and above.
- `steps.jsonl`: distributions and a few samples with their tokens, per step. Its size is bounded.
- `earlier_runs/`: results of earlier runs in this folder that were not resumed.
"""

import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.checkpoints.atomic import atomic_write
from verl.tracking.runs import append_line, open_steps, read_lines, write_lines
from verl.utils.paths import resolved
from verl.utils.redaction import redact_text

logger = logging.getLogger(__name__)

#: bytes of steps.jsonl beyond which every other step is dropped
STEPS_LIMIT = 8_000_000
#: messages in warnings.jsonl, per call of fit
WARNINGS_LIMIT = 500

#: files of a run, and those that are moved to `earlier_runs/`
_RESULTS = ("metrics.jsonl", "samples.jsonl", "steps.jsonl")
_MOVED = (*_RESULTS, *(name.replace(".", ".dropped.") for name in _RESULTS), "report.html", "tensorboard")


class RunRecord:
    """Context manager that writes the record of a run.

    Args:
        about: JSON values that describe the run: project, experiment, total_steps, config, changed.
        earlier: warnings of the checks before the run.
        step: the step in progress, which warnings are recorded with; None: the last recorded step.
        is_new: whether the run has recorded nothing yet, so that results in the folder are those of an earlier one.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        earlier: Sequence[logging.LogRecord] = (),
        step: Callable[[], int] | None = None,
        is_new: bool = True,
    ):
        self.folder = folder
        self._is_new = is_new
        self._before: dict[str, tuple[bytes, float]] = {}  # file of the earlier run -> content, time
        self._about = {
            **about,
            "state": "running",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
            "ended": None,
            "error": None,
        }
        self._every = 1
        self._step = 0
        self._broken = False
        self._earlier = earlier
        self._warnings = _WarningFile(folder / "warnings.jsonl", step or (lambda: self._step))
        self._steps = folder / "steps.jsonl"

    def __enter__(self) -> "RunRecord":
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / "run.json", self.folder / "warnings.jsonl"):
            if self._is_new and path.is_file():
                self._before[path.name] = path.read_bytes(), path.stat().st_mtime
        self._write()
        for record in self._earlier:
            self._warnings.handle(record)
        self._earlier = ()
        logging.getLogger("verl").addHandler(self._warnings)
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        logging.getLogger("verl").removeHandler(self._warnings)
        self._warnings.close()
        interrupted = error_type is not None and not issubclass(error_type, Exception)
        state = "finished" if error_type is None else "interrupted" if interrupted else "failed"
        text = None if error is None else redact_text(f"{type(error).__name__}: {error}")[:2000]
        self._about |= {"state": state, "ended": time.time(), "error": text}
        try:
            self._write()
        except OSError as failed:  # must not hide the end of the run, or the error that ended it
            logger.warning("the state of the run (%s) is not recorded in %s: %s", state, self.folder, failed)

    def resume(self, step: int) -> None:
        """Drop the steps after the checkpoint that the run resumes from; 0 for a new run. Results of an earlier run
        that is not resumed are moved to `earlier_runs/`."""
        self._step = step
        if step == 0 and self._is_new:
            self._set_aside()
        self._is_new, self._before = False, {}
        open_steps(self._steps, step).close()
        strides = [item["every"] for item in self._recorded()]
        self._every = strides[-1] if strides else 1

    def _set_aside(self) -> None:
        """Move the results of an earlier run to `earlier_runs/<name>_<number>`, if there are any."""
        folder = self.folder
        if not any((folder / name).is_file() and (folder / name).stat().st_size for name in _RESULTS):
            return
        folders = (folder / "earlier_runs" / f"{resolved(folder).name}_{number}" for number in itertools.count(1))
        aside = next(path for path in folders if not path.exists())
        aside.mkdir(parents=True)
        for name in _MOVED:
            if (folder / name).exists():
                (folder / name).rename(aside / name)
        for name, (content, written) in self._before.items():
            (aside / name).write_bytes(content)
            os.utime(aside / name, (written, written))  # the newest run is listed first
        if earlier := self._before.get("warnings.jsonl"):
            path = folder / "warnings.jsonl"
            later = path.read_bytes()[len(earlier[0]) :]
            with atomic_write(path) as draft:
                draft.write_bytes(later)
        logger.info("this run starts at step 0: the results of the run before it are moved to %s", aside)

    def add_step(self, step: int, make: Callable[[], Mapping[str, Any]], last: bool) -> None:
        """Write the record of a step, if its turn has come.

        Args:
            make: called only if the step is recorded.
            last: always record this step.
        """
        self._step = step
        if self._broken or ((step - 1) % self._every and not last):
            return
        record = make()
        if not record:
            return
        try:
            append_line(self._steps, {"step": step, "every": self._every, **record})
            if self._steps.stat().st_size > STEPS_LIMIT:  # drop every other step
                self._every *= 2
                kept = [item for item in self._recorded() if (item["step"] - 1) % self._every == 0]
                write_lines(self._steps, [{**item, "every": self._every} for item in kept])
        except OSError as error:  # as with trackers, training continues
            self._broken = True
            logger.warning("%s cannot be written (%s): no further steps are recorded", self._steps, error)

    def _recorded(self) -> list[dict[str, Any]]:
        """The lines of steps.jsonl with a step, and a step between two of them, of at least 1."""

        def is_valid(item: dict[str, Any]) -> bool:
            return all(type(item.get(name)) is int and item[name] > 0 for name in ("step", "every"))

        return list(filter(is_valid, read_lines(self._steps)))

    def _write(self) -> None:
        with atomic_write(self.folder / "run.json") as draft:
            draft.write_text(
                json.dumps(self._about, ensure_ascii=False, default=str, indent=1),
                encoding="utf-8",
                errors="backslashreplace",
            )


@contextmanager
def collected(warnings: list[logging.LogRecord]) -> Iterator[None]:
    """Append log records of level WARNING and above to a list while the block runs."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = warnings.append  # type: ignore[method-assign]
    logging.getLogger("verl").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("verl").removeHandler(handler)


class _WarningFile(logging.Handler):
    """Writes warnings and errors of this process to a file, with the step in which they were logged."""

    def __init__(self, path: Path, step: Callable[[], int]):
        super().__init__(logging.WARNING)
        self._path, self._step, self._count = path, step, 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        if self._count > WARNINGS_LIMIT:
            return
        try:
            line = {
                "time": record.created,
                "step": self._step(),
                "level": record.levelname,
                "message": redact_text(record.getMessage())[:4000],
            }
            append_line(self._path, line)
        except OSError as error:
            self._count = WARNINGS_LIMIT
            logger.warning("%s cannot be written (%s): no further warnings are recorded", self._path, error)
        except (TypeError, ValueError):
            self.handleError(record)
