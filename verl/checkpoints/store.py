"""Checkpoints on disk: `<root>/global_step_N/`, written and deleted atomically, and only by this module.

A checkpoint is written into a hidden folder and fsynced, with `manifest.json` (sizes and checksums) last. Then the
folder is renamed, and `latest_checkpointed_iteration.txt` is updated. A process that is killed at any moment leaves the
previous checkpoints intact and at most one hidden folder, which the next save removes.

    store = CheckpointStore("checkpoints/run", keep=3)
    with store.writing(step=20) as folder:      # removed if the block raises
        actor.save_checkpoint(folder / "actor")
    folder = store.latest()                     # verified; falls back to the previous one if damaged
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoints.atomic import fsync, make_folder, replacing
from verl.checkpoints.manifest import MANIFEST, is_count, make_manifest, manifest_fault
from verl.utils.disk import DiskError, disk_full, disk_full_reason, folder_size, format_bytes, refusal
from verl.utils.paths import resolved

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpoint.json"
BEST_LINK = "best"

# hidden folders next to the checkpoints: being written, replaced by another of the same step, being deleted
_WRITING, _REPLACED, _GARBAGE = ".writing_", ".replaced_", ".garbage_"
_NAME = re.compile(r"global_step_(\d+)")  # of a checkpoint


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the checkpoint, the problem and the fix."""


@dataclass(frozen=True)
class _Saved:
    """A checkpoint with a readable manifest.

    `serial` counts the saves under one root; the newest checkpoint has the largest. The step is not sufficient: a run
    that resumed from an earlier step saves smaller steps later.
    """

    folder: Path
    serial: int
    files: dict[str, dict[str, Any]]  # path inside the folder -> {"bytes": size, "sha256": checksum}

    @property
    def step(self) -> int:
        return step_of(self.folder)

    def size_fault(self) -> str | None:
        """Return a description of a file that is missing or has the wrong size, or None. Does not read contents."""
        return next(size_faults(self.folder, self.files), None)


def size_faults(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Describe the files that are missing or have the wrong size. files: entries of a manifest."""
    for name, entry in files.items():
        path = folder / name
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            yield f"{name} cannot be read ({error.strerror})"
            continue
        if size is None:
            yield f"{name} is missing"
        elif size != entry["bytes"]:
            yield f"{name}: expected {entry['bytes']} bytes, found {size}"


def content_faults(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Describe the files with the wrong checksum. Reads all contents."""
    for (name, entry), digest in zip(files.items(), _map_files(_sha256_or_error, [folder / name for name in files])):
        if isinstance(digest, OSError):
            yield f"{name} cannot be read ({digest.strerror})"
        elif digest != entry["sha256"]:
            yield f"{name}: expected sha256 {entry['sha256'][:12]}..., found {digest[:12]}..."


def step_of(folder: Path) -> int:
    """Return N of `global_step_N`. Raises CheckpointError for any other folder name."""
    match = _NAME.fullmatch(Path(folder).name)
    if match is None:
        raise CheckpointError(f"{folder} is not a checkpoint: expected a folder called global_step_N")
    return int(match.group(1))


def newest_actor(folder: Path) -> Path | None:
    """Return the `actor` folder of a checkpoint, or of the newest checkpoint of a run; None if there is none."""
    actors = [path for path in folder.glob("global_step_*/actor") if _NAME.fullmatch(path.parent.name)]
    return max(actors, key=lambda path: step_of(path.parent), default=next(folder.glob("actor"), None))


def _target(folder: Path) -> Path:
    """Return the checkpoint that a link such as `best` leads to; the folder itself if it is not a link."""
    return resolved(folder) if folder.is_symlink() else folder


def saved_step(folder: Path) -> int:
    """Return the step of a checkpoint, reading only its manifest. Raises CheckpointError if it has none."""
    return _read(_target(folder)).step


def verify(folder: str | Path) -> Path:
    """Verify the sizes and checksums of all files of a checkpoint, and return its folder. Raises CheckpointError if a
    file is missing or damaged."""
    saved = _read(Path(folder))
    fault = saved.size_fault() or next(content_faults(saved.folder, saved.files), None)
    if fault is not None:
        raise CheckpointError(f"{folder} is damaged: {fault}")
    return saved.folder


class CheckpointStore:
    """The checkpoints of one run. One process calls `writing`; all ranks may write into the folder it yields."""

    def __init__(self, root: str | Path, keep: int | None = None):
        """Configure the store; nothing is written yet.

        Args:
            root: their folder.
            keep: number of newest checkpoints to keep; None: all. Includes checkpoints from before a resume.
        """
        self.root = Path(root)
        self.keep = _check_keep(keep)
        self._size: int | None = None  # bytes of the newest checkpoint
        self._warned_of_space = False

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield an empty folder. It becomes `global_step_<step>` when the block ends, and is removed if that fails.

        A checkpoint of the same step is replaced. Older checkpoints are deleted afterwards, down to `keep`.

        Raises:
            DiskError: if the disk is full, or refuses the write, whatever the block raised.
        """
        folder = self.root / f"{_WRITING}global_step_{step}"
        try:
            make_folder(self.root)
            self._remove_leftovers()
            folder.mkdir()
            yield folder
            if not (folder / MANIFEST).exists():
                self.seal(folder)
            self._size = folder_size(folder)
            self._publish(folder, step)
        except BaseException as error:
            if (failure := self._failure(step, folder, error)) is not None:
                raise failure from error
            raise
        if self.keep is not None:
            self.prune(self.keep)

    def seal(self, folder: Path) -> None:
        """Flush the files in the folder of `writing` and write their checksums, which can take as long as writing them.

        The end of the block does it otherwise. Another thread may call it within the block.
        """
        _seal(folder, 1 + self.last_serial())

    def warn_of_space(self, weights: int = 0) -> None:
        """Warn, once until it fits again, that the next checkpoint, as large as the newest one, will not fit.
        weights: the bytes that the first one has at least."""
        if self._size is None:
            self._size = folder_size(newest) if (newest := self.newest()) else weights
        free = shutil.disk_usage(self.root).free if self._size and self.root.is_dir() else self._size
        if self._size > free and not self._warned_of_space:
            logger.warning(
                "the next checkpoint will not fit: it needs about %s, and %s has %s free. Free some space before "
                "the next save; an old checkpoint is deleted after a new one is written",
                *(format_bytes(self._size), self.root, format_bytes(free)),
            )
        self._warned_of_space = self._size > free

    def _failure(self, step: int, folder: Path, error: BaseException) -> DiskError | None:
        """Remove the incomplete `folder`. Return the error of the disk that is the cause, or None with a note."""
        exists = folder.exists()
        refused = refusal(error, self.root)
        reason, written = (disk_full_reason(error, folder), folder_size(folder)) if exists else (None, 0)
        with suppress(OSError):  # the next save removes remaining files
            self._discard(folder)
        newest = self.newest()
        name = f"the checkpoint of step {step}"
        if reason is not None:
            size = 0 if newest is None else folder_size(newest)
            needed = format_bytes(size) if newest and size >= written else f"more than {format_bytes(written)}"
            needed = f", which needs {needed}," if max(size, written) >= 1024 else ""
            fix = (
                "Free some space (trainer.max_*ckpt_to_keep limits the number of checkpoints; an old one is deleted "
                "after a new one is written), or move the folder to a larger disk and set trainer.default_local_dir"
            )
            return disk_full(f"{name}{needed}", self.root, reason, self._advice(fix, newest))
        if refused is not None:
            fix = "Make the folder writable, or copy it to another disk and set trainer.default_local_dir"
            return DiskError(f"{name} cannot be written to {self.root}: {refused}. {self._advice(fix, newest)}")
        if exists:
            error.add_note(f"{name.capitalize()} was not written to {self.root}. {_describe_remaining(newest)}")
        return None

    def _advice(self, fix: str, newest: Path | None) -> str:
        """The sentences after a failed save: the remaining checkpoints, the fix, and the effect of the same command."""
        effect = "starts over" if newest is None else f"resumes from {newest}"
        return f"{_describe_remaining(newest)} {fix}. The same command then {effect}"

    def last_serial(self) -> int:
        """Return the serial number of the newest checkpoint; 0 without one."""
        return max((saved.serial for saved in self._scan()[0]), default=0)

    def latest(self, after: int = 0) -> Path | None:
        """Return the newest checkpoint that passes verification; None if there are no checkpoints.

        A damaged checkpoint is logged as an error, and the previous one is used.

        Args:
            after: only checkpoints with a larger serial number.

        Raises:
            CheckpointError: if there are checkpoints, but none is usable. The run does not start from scratch silently.
        """
        self._restore_replaced()
        checkpoints, unusable = self._scan()
        for error in unusable:
            logger.error("%s; skipped", error)
        for saved in checkpoints:
            if saved.serial <= after:
                continue
            try:
                return verify(saved.folder)
            except CheckpointError as error:
                logger.error("%s; trying the previous checkpoint", error)
                unusable.append(str(error))
        if unusable:
            raise CheckpointError(
                f"no usable checkpoint under {self.root}: {'; '.join(unusable)}. "
                "Set trainer.resume_mode=disable to start from scratch, or another trainer.default_local_dir"
            )
        return None

    def newest(self, after: int = 0) -> Path | None:
        """Return the newest complete checkpoint by file sizes; contents are not read. after: as for `latest`."""
        return next(
            (saved.folder for saved in self._scan()[0] if saved.size_fault() is None and saved.serial > after), None
        )

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, which may not exist."""
        return self.root / f"global_step_{step}"

    def resume_path(self, path: str | Path) -> Path:
        """Verify and return the checkpoint at `path`. There is no fallback to another one."""
        return verify(_target(Path(path)))

    def best(self) -> dict[str, Any] | None:
        """Return the contents of `best_checkpoint.json`, which has `step`; None if there is no such file."""
        path = self.root / BEST
        if not path.is_file():
            return None
        try:
            best = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            logger.error("%s cannot be read and is ignored: %s", path, error)
            return None
        if not isinstance(best, dict) or not is_count(best.get("step")):
            logger.error("%s has no step and is ignored", path)
            return None
        return best

    def mark_best(self, record: Mapping[str, Any]) -> None:
        """Make the checkpoint of `record["step"]` the best one: it is not deleted, and the link `best` leads to it.
        With a true `saved_as_best`, it was not due otherwise, and is deleted when another one becomes the best."""
        previous, step = self.best(), record["step"]
        _write_atomically(self.root / BEST, json.dumps(dict(record), indent=1) + "\n")
        self._link_best(step)
        if previous is None or previous["step"] == step or not previous.get("saved_as_best"):
            return
        superseded = self.path(previous["step"])
        if (superseded / MANIFEST).is_file() and superseded != self.newest():
            self._discard(superseded)

    def _link_best(self, step: int) -> None:
        """Replace the link `best`. It is for users; this class reads `best_checkpoint.json`."""
        link, draft = self.root / BEST_LINK, self.root / f".{BEST_LINK}.draft"
        if link.exists() and not link.is_symlink():
            logger.warning("%s is not a link: it is left as it is; %s names the best checkpoint", link, BEST)
            return
        try:
            draft.unlink(missing_ok=True)
            draft.symlink_to(self.path(step).name)
            draft.replace(link)
        except OSError as error:  # a file system without links
            logger.warning("no link %s: %s; %s names the best checkpoint", link, error, BEST)

    def prune(self, keep: int) -> None:
        """Delete checkpoints older than the `keep` newest intact ones, except the best; log one that remains."""
        checkpoints = self._scan()[0]
        intact = [saved for saved in checkpoints if saved.size_fault() is None]
        if len(intact) <= _check_keep(keep):
            return
        best = self.best()
        kept = {self.newest(), self.path(best["step"]) if best else None}
        for saved in checkpoints:
            if saved.serial < intact[keep - 1].serial and saved.folder not in kept:
                with _deleting(saved.folder):
                    self._discard(saved.folder)

    def _scan(self) -> tuple[list[_Saved], list[str]]:
        """Return all checkpoints with a readable manifest, newest first, and the errors of the others."""
        if not self.root.is_dir():
            return [], []
        checkpoints, faults = [], []
        for folder in sorted(self.root.iterdir()):
            if _NAME.fullmatch(folder.name):
                try:
                    checkpoints.append(_read(folder))
                except CheckpointError as error:
                    faults.append(str(error))
        return sorted(checkpoints, key=lambda saved: -saved.serial), faults

    def _publish(self, folder: Path, step: int) -> None:
        """Rename the complete folder, then update the tracker file."""
        final = self.path(step)
        replaced = self.root / f"{_REPLACED}{final.name}"
        if os.path.lexists(final):
            final.rename(replaced)
        folder.rename(final)
        fsync(self.root)
        _write_atomically(self.root / LATEST, str(step))
        if os.path.lexists(replaced):
            with _deleting(replaced):
                self._retire(replaced, final)

    def _retire(self, replaced: Path, final: Path) -> None:
        """Delete the folder that `final` replaced. A folder that this class did not write is renamed instead."""
        if (replaced / MANIFEST).is_file():
            self._discard(replaced)
            return
        aside = final.with_name(f"{final.name}.set_aside_{replaced.lstat().st_mtime_ns}")
        replaced.rename(aside)
        logger.warning("found a %s without a %s; renamed to %s", final.name, MANIFEST, aside)

    def _restore_replaced(self) -> None:
        """Undo a replacement if the process was killed between its two renames."""
        for replaced in self.root.glob(f"{_REPLACED}*"):
            final = self.root / replaced.name.removeprefix(_REPLACED)
            if os.path.lexists(final):
                with _deleting(replaced):
                    self._retire(replaced, final)
            else:
                replaced.rename(final)

    def _remove_leftovers(self) -> None:
        """Remove the hidden folders of a killed process."""
        self._restore_replaced()
        for stale in [*self.root.glob(f"{_WRITING}*"), *self.root.glob(f"{_GARBAGE}*")]:
            if stale.name.startswith(_WRITING):
                logger.warning("removing %s: a process was killed while writing this checkpoint", stale)
            with _deleting(stale):
                _remove(stale)

    def _discard(self, folder: Path) -> None:
        """Delete a folder. It is hidden first, so an interrupted deletion leaves no incomplete checkpoint, and a thread
        that still writes into it finds no folder."""
        garbage = self.root / f"{_GARBAGE}{'_'.join(folder.relative_to(self.root).parts)}"
        _remove(garbage)
        folder.rename(garbage)
        _remove(garbage)


def _describe_remaining(newest: Path | None) -> str:
    if newest is None:
        return "There is no earlier checkpoint."
    return f"{newest.name} and earlier checkpoints are unchanged."


@contextmanager
def _deleting(path: Path) -> Iterator[None]:
    """Log an OSError of a deletion as a warning: the new checkpoint is complete, and training continues."""
    try:
        yield
    except OSError as error:
        logger.warning("%s cannot be deleted: %s", path, error)


def _remove(path: Path) -> None:
    """Delete a folder if it exists; of a link, only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _check_keep(keep: int | None) -> int | None:
    if keep is not None and keep < 1:
        raise ValueError(f"keep: expected at least 1, or null to keep all, found {keep}")
    return keep


def _seal(folder: Path, serial: int) -> None:
    """Fsync all files and folders, and write the manifest last."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths:
        raise CheckpointError(f"nothing was written into the checkpoint {folder.name.removeprefix(_WRITING)}")
    _map_files(fsync, [path for path in folder.rglob("*") if path.exists()])
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _map_files(_sha256, paths))
    }
    _write_atomically(folder / MANIFEST, make_manifest(serial, files))


def _read(folder: Path) -> _Saved:
    """Read the manifest of a checkpoint. Raises CheckpointError if there is none, or it cannot be read."""
    step_of(folder)
    path = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} {'is not a folder' if os.path.lexists(folder) else 'does not exist'}")
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {MANIFEST}: it was not written by this library, or is incomplete")
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read ({error})") from error
    if fault := manifest_fault(manifest):
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read ({fault})")
    return _Saved(folder, manifest["serial"], manifest["files"])


def _write_atomically(path: Path, text: str) -> None:
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def _map_files(function: Callable[[Path], Any], paths: list[Path]) -> list[Any]:
    """Apply a function to files in parallel; hashing and fsync release the GIL."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, paths))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_or_error(path: Path) -> str | OSError:
    try:
        return _sha256(path)
    except OSError as error:
        return error
