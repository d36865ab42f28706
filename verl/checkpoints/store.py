"""Checkpoints on disk: `<root>/global_step_N/`, whole or not there at all. The one place that writes or deletes them.

A checkpoint is written into a hidden folder, flushed to the disk, described by `manifest.json` (sizes and checksums,
written last), and then renamed; `latest_checkpointed_iteration.txt` names it afterwards. A process killed at any
moment leaves the checkpoints of before in place and at most one hidden folder, which the next save removes.

    store = CheckpointStore("checkpoints/run", keep=3)
    with store.writing(step=20) as folder:      # an exception in here leaves no trace
        actor.save_checkpoint(folder / "actor")
    folder = store.latest()                     # verified; a damaged one is refused by name, the one before is used
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.disk import DiskFullError, disk_full, in_bytes, size_of, why_no_room

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"

# Hidden folders beside the checkpoints: one being written, one that makes place for another of its step, garbage.
_WRITING, _REPLACED, _GARBAGE = ".writing_", ".replaced_", ".garbage_"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names it, what is wrong with it, and what to do."""


@dataclass(frozen=True)
class _Saved:
    """A checkpoint that has a readable manifest. `serial` counts the saves under one root: the greatest is the newest.

    The step does not tell the newest: a run that was started again from an earlier step saves smaller steps later.
    """

    folder: Path
    serial: int
    files: dict[str, dict[str, Any]]  # path inside the folder -> {"bytes": size, "sha256": checksum}
    dropped: tuple[str, ...]  # parts that were deleted on purpose to save space

    @property
    def step(self) -> int:
        return step_of(self.folder)

    @property
    def whole(self) -> bool:
        return not self.dropped and self.size_fault() is None

    def size_fault(self) -> str | None:
        """What is missing or has another size than when it was written; None when all is there. Reads no contents."""
        for name, entry in self.files.items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, written were {entry['bytes']}"
        return None

    def content_fault(self) -> str | None:
        """Which file holds something else than what was written; None when none does. Reads everything."""
        names = list(self.files)
        for name, digest in zip(names, _map_files(_sha256, [self.folder / name for name in names])):
            if digest != self.files[name]["sha256"]:
                return f"{name} has the sha256 {digest[:12]}..., written was {self.files[name]['sha256'][:12]}..."
        return None


def step_of(folder: Path) -> int:
    """The N of `global_step_N`. Raises CheckpointError for a folder of another name."""
    match = re.fullmatch(r"global_step_(\d+)", Path(folder).name)
    if match is None:
        raise CheckpointError(f"{folder} is not a checkpoint: expected a folder called global_step_N")
    return int(match.group(1))


def step_of_saved(folder: Path) -> int:
    """The step of a checkpoint that has a manifest; nothing else of it is read. CheckpointError when it has none."""
    return _read(folder).step


def verify(folder: str | Path) -> Path:
    """Check the folder against its manifest, every byte, and return it.

    Raises CheckpointError that names the folder and the first thing that is wrong with it.
    """
    saved = _read(Path(folder))
    if saved.dropped:
        parts = " and ".join(saved.dropped)
        raise CheckpointError(f"{folder} has no {parts} any more, deleted to save space: choose a newer one")
    fault = saved.size_fault() or saved.content_fault()
    if fault is not None:
        raise CheckpointError(f"{folder} is damaged: {fault}")
    return saved.folder


class CheckpointStore:
    """The checkpoints of one run. One process writes; in a run of many, all ranks fill the folder that it hands out."""

    def __init__(self, root: str | Path, keep: int | None = None):
        """`keep`: how many checkpoints stay (the newest), None for all. Counted on the disk, so also after a resume."""
        self.root = Path(root)
        self.keep = _checked_keep("keep", keep)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """An empty folder to fill; it becomes `global_step_<step>` when the block ends, and vanishes when it fails.

        A checkpoint of the same step is replaced. Older ones are deleted down to `keep` afterwards, never before.
        Raises DiskFullError where there was no room for it, whatever the block raised.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._tidy()
        serial = 1 + max((saved.serial for saved in self._scan()[0]), default=0)
        folder = self.root / f"{_WRITING}global_step_{step}"
        folder.mkdir()
        try:
            yield folder
            _seal(folder, serial)
            self._publish(folder, step)
        except BaseException as error:
            if folder.exists():
                reason, written = why_no_room(error, folder), size_of(folder)
                shutil.rmtree(folder, ignore_errors=True)  # what stays now, the next save removes
                if reason is not None:
                    raise self._full(step, reason, written) from error
                error.add_note(
                    f"The checkpoint of step {step} was not written to {self.root}; its folder was removed, the "
                    "checkpoints of before are untouched."
                )
            raise
        if self.keep is not None:
            self.prune(self.keep)

    def _full(self, step: int, reason: str, written: int) -> DiskFullError:
        """For the checkpoint of `step`, which broke off after so many bytes."""
        newest = self.newest()
        if newest is None:
            needed, kept, way_on = f"more than {in_bytes(written)}", "There is none before it.", "starts anew"
        else:
            size = size_of(newest)
            needed = in_bytes(size) if size >= written else f"more than {in_bytes(written)}"
            kept, way_on = f"{newest.name} and those before it are untouched.", f"goes on from {newest}"
        advice = (
            f"{kept} Make room (trainer.max_*ckpt_to_keep says how many stay; a new one is written before an old one "
            "goes), or move the folder to a larger disk and let trainer.default_local_dir name it there: the same "
            f"command then {way_on}"
        )
        return disk_full(f"the checkpoint of step {step}, which needs {needed},", self.root, reason, advice)

    def latest(self) -> Path | None:
        """The newest checkpoint whose every byte is as it was written, or None when there is no checkpoint at all.

        A damaged one is refused with an error in the log and the one before it is used. Raises CheckpointError when
        there are checkpoints and none of them is usable: to start anew is for the user to say.
        """
        self._restore_replaced()
        checkpoints, refused = self._scan()
        for error in refused:
            logger.error("%s; it is not used", error)
        for saved in checkpoints:
            if saved.dropped:
                continue
            try:
                return verify(saved.folder)
            except CheckpointError as error:
                logger.error("%s; the checkpoint before it is used", error)
                refused.append(str(error))
        if refused:
            raise CheckpointError(
                f"no usable checkpoint under {self.root}: {'; '.join(refused)}. "
                "Set trainer.resume_mode=disable to start anew, or another trainer.default_local_dir"
            )
        return None

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole by the sizes of its files; their contents are not read."""
        return next((saved.folder for saved in self._scan()[0] if saved.whole), None)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.root / f"global_step_{step}"

    def resume_path(self, path: str | Path | None) -> Path:
        """The checkpoint that a user named, verified; no other is used in its place."""
        if path is None:
            raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N")
        return verify(path)

    def prune(self, keep: int) -> None:
        """Delete whole checkpoints older than the newest `keep`."""
        for saved in self._surplus(self._scan()[0], _checked_keep("keep", keep)):
            self._discard(saved.folder)

    def prune_part(self, part: str, keep: int | None) -> None:
        """Delete the sub-folder `part` of the checkpoints older than the newest `keep` that have it.

        Such a checkpoint keeps its other parts, is marked in its manifest, and is not resumed from. When no
        sub-folder is left, the rest goes too.
        """
        if _checked_keep(f"checkpoints to keep for {part}", keep) is None:
            return
        having = [saved for saved in self._scan()[0] if (saved.folder / part).is_dir()]
        for saved in self._surplus(having, keep):
            files = {name: entry for name, entry in saved.files.items() if not name.startswith(f"{part}/")}
            if not any("/" in name for name in files):
                self._discard(saved.folder)
                continue
            # Marked before it is deleted: a process killed in between leaves no checkpoint that looks damaged.
            dropped = sorted({*saved.dropped, part})
            _write_atomically(saved.folder / MANIFEST, _manifest(saved.serial, files, dropped))
            self._discard(saved.folder / part)

    def _surplus(self, checkpoints: list[_Saved], keep: int) -> list[_Saved]:
        """Those older than the `keep` newest intact ones, but never the newest that can be resumed from."""
        intact = [saved for saved in checkpoints if saved.size_fault() is None]
        if len(intact) <= keep:
            return []
        resumable = self.newest()
        oldest = intact[keep - 1].serial
        return [saved for saved in checkpoints if saved.serial < oldest and saved.folder != resumable]

    def _scan(self) -> tuple[list[_Saved], list[str]]:
        """Every checkpoint with a readable manifest, newest first; and what is wrong with the others."""
        if not self.root.is_dir():
            return [], []
        found, faults = [], []
        for folder in sorted(self.root.iterdir()):
            if re.fullmatch(r"global_step_\d+", folder.name):
                try:
                    found.append(_read(folder))
                except CheckpointError as error:
                    faults.append(str(error))
        return sorted(found, key=lambda saved: -saved.serial), faults

    def _publish(self, folder: Path, step: int) -> None:
        """Give the sealed folder its name, then say so in the file that names the latest."""
        final = self.path(step)
        replaced = self.root / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        folder.rename(final)
        _flush_folder(self.root)
        _write_atomically(self.root / LATEST, str(step))
        if replaced.exists():
            self._retire(replaced, final)

    def _retire(self, replaced: Path, final: Path) -> None:
        """Delete what the checkpoint `final` took the place of; what we did not write is set aside instead."""
        if (replaced / MANIFEST).is_file():
            self._discard(replaced)
            return
        aside = final.with_name(f"{final.name}.set_aside_{replaced.stat().st_mtime_ns}")
        replaced.rename(aside)
        logger.warning("there was a %s without a %s; it is %s now", final.name, MANIFEST, aside)

    def _restore_replaced(self) -> None:
        """Undo a replacement that a kill interrupted between its two renames."""
        for replaced in self.root.glob(f"{_REPLACED}*"):
            final = self.root / replaced.name.removeprefix(_REPLACED)
            if final.exists():
                self._retire(replaced, final)
            else:
                replaced.rename(final)

    def _tidy(self) -> None:
        """Remove what a killed process left behind."""
        self._restore_replaced()
        for stale in [*self.root.glob(f"{_WRITING}*"), *self.root.glob(f"{_GARBAGE}*")]:
            if stale.name.startswith(_WRITING):
                logger.warning("removing %s: a process was stopped while it wrote this checkpoint", stale)
            shutil.rmtree(stale)

    def _discard(self, folder: Path) -> None:
        """Delete a folder so that a kill in the middle leaves it either whole or out of sight."""
        garbage = self.root / f"{_GARBAGE}{'_'.join(folder.relative_to(self.root).parts)}"
        if garbage.exists():
            shutil.rmtree(garbage)
        folder.rename(garbage)
        shutil.rmtree(garbage)


def _checked_keep(name: str, keep: int | None) -> int | None:
    if keep is not None and keep < 1:
        raise ValueError(f"{name} is {keep}: expected at least 1, or null to keep all of them")
    return keep


def _seal(folder: Path, serial: int) -> None:
    """Flush every file and folder to the disk, with the manifest as the last of them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths:
        raise CheckpointError(f"nothing was written into the checkpoint {folder.name.removeprefix(_WRITING)}")
    digests = _map_files(_flush_and_sha256, paths)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests)
    }
    for path in folder.rglob("*"):
        if path.is_dir():
            _flush_folder(path)
    _write_atomically(folder / MANIFEST, _manifest(serial, files, []))


def _manifest(serial: int, files: dict[str, dict[str, Any]], dropped: list[str]) -> str:
    return json.dumps({"format": 1, "serial": serial, "dropped": dropped, "files": files}, indent=1)


def _read(folder: Path) -> _Saved:
    """The checkpoint that the manifest of `folder` describes. Raises CheckpointError when there is none to be read."""
    step_of(folder)
    path = folder / MANIFEST
    if not path.is_file():
        if not folder.is_dir():
            raise CheckpointError(f"{folder} does not exist")
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was not written by this project, or not to its end")
    try:
        manifest = json.loads(path.read_text())
        return _Saved(folder, manifest["serial"], manifest["files"], tuple(manifest["dropped"]))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read ({error})") from error


def _write_atomically(path: Path, text: str) -> None:
    """The file has its old contents or the new ones, whatever happens in between."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Make the names inside the folder durable, as fsync of a file does for its contents."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _map_files(function, paths: list[Path]) -> list[str]:
    """Apply to many files at once: checksums and flushes release the interpreter lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, paths))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_and_sha256(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
