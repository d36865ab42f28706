"""JSONL files: reading and writing, and continuing those of a run from the checkpoint that it resumes from."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from verl.checkpoints.atomic import atomic_write, set_aside_irregular

logger = logging.getLogger(__name__)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; none if there is no file. NaN and Infinity are None.

    Damaged lines, as of a killed process, are skipped.
    """
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
    set_aside_irregular(path)
    set_aside_irregular(path.with_suffix(".dropped.jsonl"))
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
