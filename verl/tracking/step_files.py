"""JSONL files with one or more lines per step, which a resumed run continues from its checkpoint."""

import json
import logging
from pathlib import Path
from typing import TextIO

from verl.checkpoints.atomic import atomic_write

logger = logging.getLogger(__name__)


def open_steps(path: Path, resume_step: int) -> TextIO:
    """Open a JSONL file to append to it, without the lines of steps after `resume_step`.

    These lines, and those that are damaged, are moved to `<name>.dropped.jsonl`.
    """
    kept, dropped = [], []
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
    except ValueError:  # no JSON, or no UTF-8
        return False
    step = record.get("step") if isinstance(record, dict) else None
    return isinstance(step, int) and step <= resume_step and line.endswith(b"\n")
