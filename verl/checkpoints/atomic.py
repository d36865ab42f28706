"""Files that are whole or not there at all, whenever the process is killed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.utils.disk import room_for


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes `path` when the block ends, flushed to the disk, and is removed when it fails.

    A killed process leaves at most that draft, which the next one overwrites. Raises DiskFullError.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with room_for(path.name, path.parent, "Make room, and give the same command again"):
            yield draft
            _flush(draft)
        draft.replace(path)
        _flush(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def check_folder(key: str, folder: Path) -> None:
    """Raise ValueError, with the key that named it, for a folder that cannot be written to, or cannot be made."""
    folder = folder.expanduser().resolve()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    what = f"{key}: expected a folder to write to, found {str(there)!r}"
    if not there.is_dir():
        raise ValueError(f"{what}: it is a file")
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"{what}: {error}") from error


def make_folder_of(path: Path, key: str) -> None:
    """The folder that `path` will lie in. Raises ValueError as `check_folder` does."""
    check_folder(key, path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)


def _flush(path: Path) -> None:
    """Make the contents of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
