"""Atomic writes: a file is complete or absent, whenever the process is killed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.utils.disk import raise_disk_full
from verl.utils.paths import expanded, resolved


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """`replacing`, for a file whose command can be run again. Raises DiskFullError if there is no space left."""
    advice = "Free some space and run the same command again"
    with raise_disk_full(path.name, path.parent, advice), replacing(path) as draft:
        yield draft


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It is fsynced and renamed to `path` when the block ends.

    If the block fails, the temporary file is removed; that of a killed process is overwritten by the next write. Errors
    of the disk are those of the system.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        fsync(draft)
        draft.replace(path)
        fsync(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def check_folder(key: str, folder: Path) -> None:
    """Raise ValueError if a folder cannot be created or written to. key: the config key, for the message."""
    path = expanded(folder)
    folder = resolved(folder)
    try:
        dangling = path.is_symlink() and not path.exists()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError as error:  # a name that is too long
        raise ValueError(f"{key}: expected a writable folder, found {str(path)!r}: {error.strerror}") from error
    if dangling:
        raise ValueError(
            f"{key}: expected a writable folder, found {str(path)!r}, a link to {os.readlink(path)!r}, which does "
            "not exist: create that folder, or remove the link"
        )
    if not existing.is_dir():
        raise ValueError(f"{key}: expected a writable folder, found {str(existing)!r}, which is a file")
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{key}: expected a writable folder, found {str(existing)!r}: {error}") from error


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; new entries are durable when it returns."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush the contents of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
