"""JSONL files of a run: their lines, and continuing them from the checkpoint that a run resumes from."""

import json
import logging
from collections.abc import Iterator
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


def open_steps(path: Path, resume_step: int) -> TextIO:
    """Open a JSONL file to append to it, without the lines of steps after `resume_step`.

    These lines, and those that are damaged, are moved to `<name>.dropped.jsonl`.
    """
    kept, dropped = [], []
    set_aside_irregular(path)
    set_aside_irregular(path.with_suffix(".dropped.jsonl"))
    if path.is_file():
        for line in path.read_bytes().splitlines(keepends=True):
            (kept if _is_kept(line, resume_step) else dropped).append(line)
    if dropped:
        with path.with_suffix(".dropped.jsonl").open("ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in dropped)
        with atomic_write(path) as draft:
            draft.write_bytes(b"".join(kept))
        logger.info("%s: moved %d lines after step %d to a .dropped file", path, len(dropped), resume_step)
    # a lone surrogate, which UTF-8 does not have, becomes an escape of JSON
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def _is_kept(line: bytes, resume_step: int) -> bool:
    """Whether a line is of a step up to the checkpoint. A process that was killed leaves a partial last line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or no UTF-8
        return False
    step = record.get("step") if isinstance(record, dict) else None
    return type(step) is int and 0 <= step <= resume_step and line.endswith(b"\n")
