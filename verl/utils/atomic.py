"""Files that are whole or not there at all, whenever the process is killed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes `path` when the block ends, flushed to the disk, and is removed when it fails.

    A killed process leaves at most that draft, which the next one overwrites.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        _flush(draft)
        draft.replace(path)
        _flush(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def make_folder_of(path: Path, key: str) -> None:
    """The folder that `path` will lie in. ValueError, with the key that named the path, when it cannot be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{key}: the folder {path.parent} cannot be made: {error}") from error


def _flush(path: Path) -> None:
    """Make the contents of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
