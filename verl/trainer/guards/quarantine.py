"""Training rows whose responses cannot be scored, with reward.on_error=quarantine.

The run ends in the step in which the reward function fails, after it has written the rows to `quarantine.jsonl` in its
folder. The same command resumes from the last checkpoint and drops these rows from then on.
"""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoints.atomic import atomic_write
from verl.data.bad_rows import parse_json
from verl.data.rlhf_dataset import RLHFDataset
from verl.rewards.outcome import QuarantineError
from verl.tracking.formatting import format_line

if TYPE_CHECKING:
    from verl.trainer.base import Trainer

logger = logging.getLogger("verl.trainer")

FILE = "quarantine.jsonl"


def apply_quarantine(trainer: "Trainer") -> None:
    """Let the source of a trainer drop the rows in the file of its folder.

    Raises:
        ValueError: a line of the file is invalid, or too few rows remain.
    """
    path, source = trainer.folder / FILE, trainer.source
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: expected the rows to drop; remove it to use all rows")
    rows = set(_rows_of(path.read_text(encoding="utf-8", errors="replace").splitlines(), path, len(source.dataset)))
    if rows:
        source.drop(rows)
        logger.warning(
            "dropping %d of %d rows of the training data, whose responses could not be scored (%s): %s",
            *(len(rows), len(source.dataset), path, ", ".join(map(str, sorted(rows)[:20]))),
        )


def _rows_of(lines: Iterable[str], path: Path, count: int) -> Iterable[int]:
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        found = parse_json(line, where, 'an object with "row"')
        row = found.get("row") if isinstance(found, dict) else None
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < count:
            raise ValueError(
                f'{where}: expected an object with "row", a row of the training data from 0 to {count - 1}, found '
                f"{format_line(line)}: fix the line, or delete the file to use all rows"
            )
        yield row


def quarantine(trainer: "Trainer", error: BaseException) -> None:
    """After a QuarantineError, add the rows of its samples to the file, and a note about it to the error."""
    if not isinstance(error, QuarantineError):
        return
    path, dataset = trainer.folder / FILE, trainer.source.dataset
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for uid, reason in error.failures.items():
        row = int(uid.rpartition(":")[2])
        where = dataset.dataframe.location(row) if isinstance(dataset, RLHFDataset) else None
        lines.append(
            json.dumps({"row": row, "uid": uid, "place": where, "step": trainer.attempted_step, "reason": reason})
        )
    with atomic_write(path) as draft:
        draft.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    error.add_note(
        f"the rows of these {len(error.failures)} prompts were added to {path}: the same command continues without them"
    )
    try:
        apply_quarantine(trainer)  # for another `fit` of this trainer
    except ValueError as too_few:
        error.add_note(str(too_few))
