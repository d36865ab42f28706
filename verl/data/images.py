"""Images of data files: found, checked, and decoded when they are used.

A source is bytes, a path (relative to the folder of the data file), {"bytes": ...}, {"path": ...}, {"image": ...}, a
data URI, base64 text, a uint8 array (height, width, channels) or a PIL image. A URL is refused unless
`data.allow_image_urls` is set.
"""

import base64
import binascii
import hashlib
import io
import logging
import math
import os
import re
import threading
import urllib.request
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.utils.disk import cache_folder
from verl.utils.paths import expanded, resolved

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

MOST_PIXELS = 89_478_485
"""Images with more pixels are refused before they are decoded; the limit of Pillow."""
LEAST_SIDE = 4
"""Images with a shorter side are refused: an array (1, 1, 3) has no unique order of height, width and channels."""

_SOURCES = "bytes, a path, a PIL image, a uint8 array, or a dict with 'bytes', 'path' or 'image'"
_ROTATED = (5, 6, 7, 8)  # values of the EXIF orientation that swap width and height
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]{64,}={0,2}\s*")
_LARGEST_DOWNLOAD = 100 << 20
_TIMEOUT = 20.0  # seconds
_LOADING = threading.Lock()


class MediaError(ValueError):
    """An image or video that cannot be used. The message names file, row, what was expected and found."""


@dataclass(frozen=True)
class ImageLimits:
    """Settings of all images of a dataset: data.min_pixels, data.max_pixels and data.allow_image_urls."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    allow_urls: bool = False

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height within the limits; the ratio of the sides is kept."""
        pixels = width * height
        if self.max_pixels is not None and pixels > self.max_pixels:
            scale, rounded = math.sqrt(self.max_pixels / pixels), math.floor
        elif self.min_pixels is not None and pixels < self.min_pixels:
            scale, rounded = math.sqrt(self.min_pixels / pixels), math.ceil
        else:
            return width, height
        return max(rounded(width * scale), 1), max(rounded(height * scale), 1)


NO_LIMITS = ImageLimits()


class RowImage:
    """An image of a row, decoded by `decode`.

    Args:
        source: see the module docstring.
        where: names the image in errors: file, row and number.
        folder: the folder that relative paths start from.
        limits: settings of the dataset.
    """

    def __init__(self, source: Any, where: str, folder: Path = Path(), limits: ImageLimits = NO_LIMITS):
        self._source, self.where, self._folder, self._limits = source, where, folder, limits
        self._is_given = False  # whether the source is a PIL image

    def size(self) -> tuple[int, int]:
        """Width and height of the decoded image. Only the header is read.

        Raises:
            MediaError: no such file, no image, or one that is not supported.
        """
        image = self._open()
        try:
            with self._alone():
                rotated = image.getexif().get(0x0112) in _ROTATED
        except Exception as error:  # Pillow raises errors of many types for damaged files
            raise self._damaged(error) from error
        return self._limits.resized(*(image.size[::-1] if rotated else image.size))

    def decode(self) -> "Image":
        """The image as RGB: rotated as its EXIF data says, transparent parts white, resized to the limits.

        Raises:
            MediaError: as `size`, and for a truncated or damaged file.
        """
        from PIL import Image, ImageOps

        image = self._open()
        try:
            with self._alone():
                image.load()
                image = ImageOps.exif_transpose(image)
        except Exception as error:  # as above
            raise self._damaged(error) from error
        image = self._as_rgb(image)
        size = self._limits.resized(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)

    # ---- opening ----------------------------------------------------------------------------------------------------

    def _open(self) -> "Image":
        """The image with its header read and checked."""
        found = self._found(self._source)
        if isinstance(found, bytes):
            found = self._parsed(found)
        width, height = found.size
        if width * height > MOST_PIXELS:
            raise self._error(
                f"expected at most {MOST_PIXELS:,} pixels, found {width} x {height} = {width * height:,}: "
                "store a smaller image"
            )
        if min(width, height) < LEAST_SIDE:
            raise self._error(
                f"expected at least {LEAST_SIDE} pixels on each side, found {width} x {height}: replace the image or "
                "remove the row"
            )
        frames = getattr(found, "n_frames", 1)  # only the formats with several frames have it
        if frames > 1 and found.format != "MPO":  # MPO: a photo with a preview, the photo first
            raise self._error(
                f"expected one frame, found an animation ({found.format}) of {frames} frames: save the frame to use, "
                "or move it to the column of videos (data.video_key)"
            )
        return found

    def _alone(self) -> AbstractContextManager[Any]:
        """A context for reading pixels: rows may share a PIL image, which only one thread may read."""
        return _LOADING if self._is_given else nullcontext()

    def _parsed(self, data: bytes) -> "Image":
        from PIL import Image, UnidentifiedImageError

        if not data:
            raise self._error("expected an image, found 0 bytes: write the file again, or remove the row")
        ignore_size_warnings()  # the size is checked by `_open`
        try:
            return Image.open(io.BytesIO(data))
        except UnidentifiedImageError as error:
            raise self._error(
                f"expected an image (PNG, JPEG, WebP, ...), found {len(data):,} bytes of another kind, which start "
                f"with {data[:16]!r}: convert the file, or remove the row"
            ) from error
        except Image.DecompressionBombError as error:
            pixels = re.search(r"\d+", str(error))
            found = f"{int(pixels[0]):,}" if pixels else "more"
            raise self._error(
                f"expected at most {MOST_PIXELS:,} pixels, found {found} in {len(data):,} bytes: store a smaller one"
            ) from error
        except Exception as error:  # as above
            raise self._damaged(error) from error

    def _found(self, source: Any) -> "Image | bytes":
        """The bytes of the image, or the image itself."""
        from PIL import Image

        if isinstance(source, Image.Image):
            self._is_given = True
            return source
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if isinstance(source, str | Path):
            return self._from_text(str(source))
        if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.ndim in (2, 3):
            return Image.fromarray(source)
        if isinstance(source, Mapping):
            for key in ("bytes", "image", "path", "url", "image_url"):
                if source.get(key) is not None:
                    return self._found(source[key])
        found = f"a dict with the keys {', '.join(map(str, source))}" if isinstance(source, Mapping) else repr(source)
        raise self._error(f"expected {_SOURCES}, found {found[:200]}")

    def _from_text(self, text: str) -> bytes:
        if text.startswith("data:"):
            return self._from_base64(text.partition(",")[2])
        if re.match(r"https?://", text):
            if not self._limits.allow_urls:
                raise self._error(
                    f"expected a file or bytes, found the URL {text:.100}: save the image next to the data file, or "
                    "set data.allow_image_urls=true to download it once"
                )
            return self._download(text)
        path = self._folder / expanded(text.removeprefix("file://"))
        try:
            if path.is_file():
                return path.read_bytes()
        except OSError as error:  # a name that is too long, or a file that must not be read
            if not _BASE64.fullmatch(text):
                raise self._error(f"expected a readable file {text:.100}, found {error.strerror}") from error
        if _BASE64.fullmatch(text):
            return self._from_base64(text)
        raise self._error(f"expected a file {text!r:.200} (in {resolved(self._folder)}), found no such file")

    def _from_base64(self, text: str) -> bytes:
        try:
            return base64.b64decode(re.sub(r"\s", "", text).replace("-", "+").replace("_", "/"), validate=True)
        except binascii.Error as error:
            raise self._error(f"expected base64 text, found {text[:32]!r}...: {error}") from error

    def _download(self, url: str) -> bytes:
        """The bytes of a URL; they are stored in the cache folder, and downloaded once."""
        cache = cache_folder() / "images"
        stored = cache / hashlib.sha256(url.encode()).hexdigest()
        if (found := _read_stored(stored)) is not None:
            return found
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT) as reply:
                data = reply.read(_LARGEST_DOWNLOAD + 1)
        except (OSError, ValueError) as error:
            raise self._error(f"expected an image at {url:.200}, found {type(error).__name__}: {error}") from error
        if len(data) > _LARGEST_DOWNLOAD:
            raise self._error(f"expected at most {_LARGEST_DOWNLOAD >> 20} MiB at {url:.200}, found more")
        draft = stored.with_suffix(f".{os.getpid()}.{threading.get_ident()}.draft")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(hashlib.sha256(data).digest() + data)
            draft.replace(stored)
        except OSError as error:
            logger.warning("downloaded images are not stored in %s (VERL_CACHE_DIR): %s", cache, error)
        return data

    # ---- pixels -----------------------------------------------------------------------------------------------------

    def _as_rgb(self, image: "Image") -> "Image":
        """The image as RGB on a white ground."""
        from PIL import Image

        if image.mode.startswith("I;16"):  # 16 bits per pixel: the upper 8
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise self._error(
                f"expected 8 or 16 bits per channel, found 32 (mode {image.mode}), whose range is unknown: save the "
                "image with 8 bits per channel"
            )
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return image if image.mode == "RGB" else image.convert("RGB")

    # ---- errors -----------------------------------------------------------------------------------------------------

    def _damaged(self, error: Exception) -> MediaError:
        return self._error(
            f"expected a complete image, found a damaged file ({error}): write it again or remove the row"
        )

    def _error(self, what: str) -> MediaError:
        return MediaError(f"{self.where}{_named(self._source)}: {what}")


def ignore_size_warnings() -> None:
    """Ignore Pillow's warning of large images, which are refused here. `warnings.catch_warnings` is not thread-safe."""
    from PIL import Image

    if ("ignore", None, Image.DecompressionBombWarning, None, 0) not in warnings.filters:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def _read_stored(path: Path) -> bytes | None:
    """An image in the cache folder, without the checksum before it; None if it is not there, or damaged."""
    with suppress(OSError):
        content = path.read_bytes()
        size = hashlib.sha256().digest_size
        if content[:size] == hashlib.sha256(content[size:]).digest():
            return content[size:]
    return None


def _named(source: Any) -> str:
    """The file name of a source that has one, in parentheses."""
    path = source.get("path") if isinstance(source, Mapping) else source
    return f" ({path:.100})" if isinstance(path, str) and len(path) < 300 and not path.startswith("data:") else ""
