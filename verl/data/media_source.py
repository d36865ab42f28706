"""Bytes of images and videos that a row gives as text: a path, a data URI or base64 text."""

import base64
import binascii
import re
import reprlib
import stat
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.paths import resolved

FEWER_IMAGE_TOKENS = "reduce data.max_pixels"
"""The fix in every error of a prompt or example that is too long and has images."""

_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]{64,}={0,2}\s*")
_URL = re.compile(r"https?://", re.IGNORECASE)


class MediaError(ValueError):
    """An image or video that cannot be used. The message names file and row, expected and found value."""


def load_media(source: Any, folder: Path, error: Callable[[str], MediaError]) -> bytes | None:
    """The bytes of an image or video; None for a source of another kind.

    Args:
        source: bytes, or as text a path, a data URI or base64 text.
        folder: the folder that relative paths start from.
        error: returns an error that names the row, for a message "expected ..., found ...".

    Raises:
        MediaError: no such file, one that cannot be read, invalid base64 text, or a URL.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str | Path):
        return None
    text = str(source)
    if text[:5].lower() == "data:":
        return _from_base64(urllib.parse.unquote(text.partition(",")[2]), error)
    if _URL.match(text):
        raise error(
            f"expected a file or bytes, found the URL {text:.100}: download the file next to the data file, and write "
            "its path"
        )
    try:
        path = folder / Path(text.removeprefix("file://")).expanduser()
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path.read_bytes()
        actual = "a folder" if stat.S_ISDIR(mode) else "a device, pipe or socket"
    except (FileNotFoundError, NotADirectoryError):
        actual = "no such file"
    except OSError as failure:  # a name that is too long, a loop of links, or a file that must not be read
        actual = str(failure.strerror)
    except (ValueError, RuntimeError) as failure:  # a null character, or the home folder of an unknown user
        actual = str(failure)
    if _BASE64.fullmatch(text):
        return _from_base64(text, error)
    start = "the current folder" if folder == Path() else "the folder of the data file"
    raise error(
        f"expected a file {text!r:.200} (in {resolved(folder)}), found {actual} (paths are relative to {start}): "
        "correct the path or remove the row"
    )


def describe(value: Any) -> str:
    """A value in an error message: one line of at most 200 characters."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(str, value))}"[:200]
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return " ".join(reprlib.repr(value).split())[:200]


def _from_base64(text: str, error: Callable[[str], MediaError]) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s", "", text).replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError) as failure:  # ValueError: not ASCII
        raise error(f"expected base64 text, found {text[:32]!r}... ({failure}): encode the file again") from failure
