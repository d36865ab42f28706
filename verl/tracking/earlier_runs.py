"""Results of an earlier run in the folder of a new one: they are moved to `earlier_runs/`, not overwritten.

    earlier = EarlierRun(folder)       # before run.json is written
    earlier.set_aside()                # if the new run starts at step 0

The subfolder is the folder of a run, which `verl runs` and `verl report` read.
"""

import logging
import os
from pathlib import Path

from verl.checkpoints.atomic import atomic_write
from verl.utils.paths import resolved

logger = logging.getLogger(__name__)

_RESULTS = ("metrics.jsonl", "samples.jsonl", "steps.jsonl")
_MOVED = (*_RESULTS, *(name.replace(".", ".dropped.") for name in _RESULTS), "curves.png", "report.html", "tensorboard")


class EarlierRun:
    """What an earlier run has recorded in a folder. The state of run.json and of the warnings is that of now.

    Args:
        folder: `trainer.default_local_dir` of the new run.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        about, warnings = folder / "run.json", folder / "warnings.jsonl"
        self._about = about.read_bytes() if about.is_file() else None
        self._written = about.stat().st_mtime if about.is_file() else 0.0
        self._warnings = warnings.stat().st_size if warnings.is_file() else 0

    def set_aside(self) -> Path | None:
        """Move the results to `earlier_runs/<name>_<number>`. None: there are none, as of a run that did not start."""
        results = [self._folder / name for name in _RESULTS]
        if not any(path.is_file() and path.stat().st_size for path in results):
            return None
        aside = self._new_folder()
        for name in _MOVED:
            if (self._folder / name).exists():
                (self._folder / name).rename(aside / name)
        if self._warnings:
            path = self._folder / "warnings.jsonl"
            lines = path.read_bytes()
            (aside / "warnings.jsonl").write_bytes(lines[: self._warnings])
            with atomic_write(path) as draft:
                draft.write_bytes(lines[self._warnings :])
        if self._about is not None:
            (aside / "run.json").write_bytes(self._about)
            os.utime(aside / "run.json", (self._written, self._written))  # the newest run is listed first
        logger.info("this run starts at step 0: the results of the run before it are moved to %s", aside)
        return aside

    def _new_folder(self) -> Path:
        parent, number = self._folder / "earlier_runs", 1
        while True:
            path = parent / f"{resolved(self._folder).name}_{number}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                return path
