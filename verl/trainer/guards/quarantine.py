"""Training rows whose responses cannot be scored, with reward.on_error=quarantine.

The run ends in the step in which the reward function fails, after it has written the rows to `quarantine.jsonl` in its
folder. The same command resumes from the last checkpoint and drops these rows from then on.
"""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from verl.checkpoints.atomic import atomic_write
from verl.config.fields import Schema
from verl.data.bad_rows import parse_json
from verl.data.order import PromptSource
from verl.data.rlhf_dataset import RLHFDataset
from verl.rewards.outcome import QuarantineError
from verl.tracking.formatting import format_line
from verl.trainer.guards.base import Guard
from verl.trainer.view import RunView

logger = logging.getLogger("verl.trainer")

FILE = "quarantine.jsonl"


def drop_quarantined(source: PromptSource, folder: Path) -> None:
    """Let a source drop the rows in the file of the folder of a run.

    Raises:
        ValueError: a line of the file is invalid, or too few rows remain.
    """
    path = folder / FILE
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
        location = f"{path}, line {number}"
        entry = parse_json(line, location, 'an object with "row"')
        row = entry.get("row") if isinstance(entry, dict) else None
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < count:
            raise ValueError(
                f'{location}: expected an object with "row", a row of the training data from 0 to {count - 1}, found '
                f"{format_line(line)}: fix the line, or delete the file to use all rows"
            )
        yield row


class Quarantine(Guard):
    """Writes the rows that could not be scored to the file."""

    def __init__(self, config: Schema):
        pass

    def on_error(self, view: RunView, error: BaseException) -> None:
        """Add the rows of a QuarantineError to the file, and a note about it to the error."""
        if not isinstance(error, QuarantineError):
            return
        path, dataset = view.folder / FILE, view.source.dataset
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for uid, reason in error.failures.items():
            row = int(uid.rpartition(":")[2])
            location = dataset.dataframe.location(row) if isinstance(dataset, RLHFDataset) else None
            entry = {"row": row, "uid": uid, "place": location, "step": view.attempted_step, "reason": reason}
            lines.append(json.dumps(entry))
        with atomic_write(path) as draft:
            draft.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        error.add_note(
            f"the rows of these {len(error.failures)} prompts were added to {path}: the same command continues without "
            "them"
        )
        try:
            drop_quarantined(view.source, view.folder)  # for another `fit` of this trainer
        except ValueError as too_few:
            error.add_note(str(too_few))
