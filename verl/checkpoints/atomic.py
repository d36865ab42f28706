"""Atomic writes: a file is complete or absent, whenever the process is killed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.utils.disk import raise_disk_full


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It is fsynced and renamed to `path` when the block ends.

    If the block fails, the temporary file is removed; that of a killed process is overwritten by the next write.

    Raises:
        DiskFullError: if there is no space left.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with raise_disk_full(path.name, path.parent, "Free some space and run the same command again"):
            yield draft
            _fsync(draft)
        draft.replace(path)
        _fsync(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def check_folder(key: str, folder: Path) -> None:
    """Raise ValueError if a folder cannot be created or written to. key: the config key, for the message."""
    folder = folder.expanduser().resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    what = f"{key}: expected a writable folder, found {str(existing)!r}"
    if not existing.is_dir():
        raise ValueError(f"{what}, which is a file")
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{what}: {error}") from error


def make_parent_folder(path: Path, key: str) -> None:
    """Create the folder of `path`. Raises ValueError like `check_folder`."""
    check_folder(key, path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)


def _fsync(path: Path) -> None:
    """Flush the contents of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
