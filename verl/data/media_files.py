"""Digest of the images and videos that rows name by a path: two runs on the same rows may find other files there."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.files import Rows
from verl.utils.paths import expanded, resolved

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
        row, texts = rows[index], []
        _with_texts([row.get(column) for column in columns], lambda text, _, texts=texts: texts.append(text))
        for text in texts:
            path = rows.folder(index) / expanded(text.removeprefix("file://"))
            if not text.startswith(("data:", "http://", "https://")) and _is_file(path):
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

    def moved(text: str, key: str) -> str:
        is_path = key != "content" if key else is_source
        is_relative = is_path and not text.startswith(("data:", "http://", "https://", "file://", "~"))
        is_moved = is_relative and not Path(text).is_absolute() and _is_file(folder / text)
        return os.path.relpath(resolved(folder) / text, resolved(target)) if is_moved else text

    return _with_texts(value, moved)


def _with_texts(value: Any, convert: Callable[[str, str], str], key: str = "") -> Any:
    """A value of a row in which every text that may be a path is `convert(text, key)`. key: of the text in a dict."""
    if isinstance(value, str):
        return convert(value, key)
    if isinstance(value, Mapping):
        is_path = value.get("bytes") is None
        return {**value, **{k: _with_texts(value[k], convert, k) for k in _KEYS if k in value and is_path}}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [_with_texts(each, convert, key) for each in value]
    return value


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
