"""Digest of the images and videos that rows name by a path: two runs on the same rows may find other files there."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.files import Rows
from verl.utils.paths import resolved

#: at most this many evenly spaced rows are read
_ROWS = 512
_BLOCK_BYTES = 1 << 16
_KEYS = ("image", "images", "video", "videos", "path", "url", "image_url", "content")


def media_digest(rows: Rows, columns: tuple[str, ...]) -> str | None:
    """A digest of the sizes and of the first and last 64 KiB of the files; None if no row names a file.

    Of many rows, 512 evenly spaced ones are read.

    Args:
        rows: the rows.
        columns: those with images, videos or chat messages.
    """
    digest, has_files = hashlib.sha256(), False
    for index in range(0, len(rows), 1 + len(rows) // _ROWS):
        row, folder = rows[index], rows.folder(index)
        for path in (folder / text for column in columns for text in _texts(row.get(column))):
            if _is_file(path):
                has_files = True
                digest.update(_file_digest(path))
    return digest.hexdigest() if has_files else None


def relocated(value: Any, folder: Path, target: Path, is_source: bool = True) -> Any:
    """A value of a row whose paths of images and videos start from another folder.

    Args:
        value: of a column with images, videos or chat messages.
        folder: where its relative paths start.
        target: where those of the result start. Paths that are absolute, and texts that are no file, are kept.
        is_source: whether `value` itself may be a path; false for a column of prompts.
    """
    if isinstance(value, str):
        is_relative = is_source and not value.startswith(("data:", "http://", "https://", "file://", "~"))
        path = folder / value
        is_moved = is_relative and not Path(value).is_absolute() and _is_file(path)
        return os.path.relpath(resolved(folder) / value, resolved(target)) if is_moved else value
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return value
        new = {key: relocated(value[key], folder, target, key != "content") for key in _KEYS if key in value}
        return {**value, **new}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [relocated(each, folder, target, is_source) for each in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """The texts of a media column or of messages that may be paths."""
    if isinstance(value, str):
        text = value.removeprefix("file://")
        if not text.startswith(("data:", "http://", "https://")):
            yield text
    elif isinstance(value, Mapping):
        if value.get("bytes") is None:
            for key in _KEYS:
                yield from _texts(value.get(key))
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        for each in value:
            yield from _texts(each)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a text that is no path
        return False


def _file_digest(path: Path) -> bytes:
    """The size of a file and the hash of its first and last block, which do not overlap."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_BLOCK_BYTES)
        file.seek(max(_BLOCK_BYTES, size - _BLOCK_BYTES))
        last = file.read(_BLOCK_BYTES)
    return str(size).encode() + hashlib.sha256(first + last).digest()
