"""Bytes of images and videos that a row gives as text: a path, a data URI, base64 text or a URL."""

import base64
import binascii
import hashlib
import logging
import os
import re
import reprlib
import stat
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.disk import cache_folder
from verl.utils.paths import resolved

logger = logging.getLogger(__name__)

FEWER_IMAGE_TOKENS = "reduce data.max_pixels"
"""The fix in every error of a prompt or example that is too long and has images."""

_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]{64,}={0,2}\s*")
_URL = re.compile(r"https?://", re.IGNORECASE)
_LARGEST_DOWNLOAD = 100 << 20
_TIMEOUT = 20.0  # seconds


class MediaError(ValueError):
    """An image or video that cannot be used. The message names file and row, expected and found value."""


def load_media(source: Any, folder: Path, allow_urls: bool, error: Callable[[str], MediaError]) -> bytes | None:
    """The bytes of an image or video; None for a source of another kind.

    Args:
        source: bytes, or as text a path, a data URI, base64 text or a URL.
        folder: the folder that relative paths start from.
        allow_urls: whether URLs are downloaded (data.allow_image_urls).
        error: returns an error that names the row, for a message "expected ..., found ...".

    Raises:
        MediaError: no such file, one that cannot be read, invalid base64 text, or a URL that is not allowed or cannot
            be downloaded.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str | Path):
        return None
    text = str(source)
    if text[:5].lower() == "data:":
        return _from_base64(urllib.parse.unquote(text.partition(",")[2]), error)
    if _URL.match(text):
        if not allow_urls:
            raise error(
                f"expected a file or bytes, found the URL {text:.100}: save the file next to the data file, or set "
                "data.allow_image_urls=true to download it once"
            )
        return _download(text, error)
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


def _download(url: str, error: Callable[[str], MediaError]) -> bytes:
    """The bytes of a URL; they are stored in the cache folder, and downloaded once."""
    cache = cache_folder() / "images"
    stored = cache / hashlib.sha256(url.encode()).hexdigest()
    if (cached := _read_stored(stored)) is not None:
        return cached
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as reply:
            data = reply.read(_LARGEST_DOWNLOAD + 1)
    except (OSError, ValueError) as failure:
        raise error(
            f"expected a file at {url:.200}, found {type(failure).__name__}: {failure}: correct the URL, or save the "
            "file next to the data file"
        ) from failure
    if len(data) > _LARGEST_DOWNLOAD:
        raise error(f"expected at most {_LARGEST_DOWNLOAD >> 20} MiB at {url:.200}, found more: save a smaller file")
    draft = stored.with_suffix(f".{os.getpid()}.{threading.get_ident()}.draft")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(hashlib.sha256(data).digest() + data)
        draft.replace(stored)
    except OSError as failure:
        logger.warning("downloaded images are not stored in %s (VERL_CACHE_DIR): %s", cache, failure)
    return data


def _read_stored(path: Path) -> bytes | None:
    """A file of the cache folder, without the checksum before it; None if it is not there, or damaged."""
    with suppress(OSError):
        content = path.read_bytes()
        size = hashlib.sha256().digest_size
        if content[:size] == hashlib.sha256(content[size:]).digest():
            return content[size:]
    return None
