"""Images of data files: found, checked, and decoded when they are used.

A source is bytes, a path (relative to the folder of the data file), {"bytes": ...}, {"path": ...}, {"image": ...}, a
data URI, base64 text, a uint8 array (height, width, channels) or a PIL image. A URL is refused.
"""

import base64
import binascii
import io
import math
import re
import reprlib
import stat
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.utils.paths import resolved

if TYPE_CHECKING:
    from PIL.Image import Image

FEWER_IMAGE_TOKENS = "reduce data.max_pixels"
"""The fix in every error of a prompt or example that is too long and has images."""

EXTERNAL_FORMATS = ("EPS", "WMF")
"""Formats that Pillow does not decode itself: it runs Ghostscript for EPS, and calls Windows for WMF."""
MOST_PIXELS = 89_478_485
"""Images with more pixels are refused before they are decoded; Pillow warns of them."""
LEAST_SIDE = 4
"""Images with a shorter side are refused: an array (1, 1, 3) has no unique order of height, width and channels."""

_SOURCES = (
    "bytes, a path, a PIL image, a uint8 array (height, width[, channels]), or a dict with 'bytes', 'path' or 'image'"
)
_SOURCE_KEYS = ("bytes", "image", "path", "url", "image_url")
_CHANNELS = ((), (1,), (2,), (3,), (4,))
_ROTATED = (5, 6, 7, 8)  # values of the EXIF orientation that swap width and height
_LOADING = threading.Lock()
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]{64,}={0,2}\s*")
_URL = re.compile(r"https?://", re.IGNORECASE)


class MediaError(ValueError):
    """An image or video that cannot be used. The message names file and row, expected and found value."""


@dataclass(frozen=True)
class ImageLimits:
    """Settings of all images of a dataset: data.min_pixels and data.max_pixels."""

    min_pixels: int | None = None
    max_pixels: int | None = None

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
        location: names the image in errors: file, row and number.
        folder: the folder that relative paths start from.
        limits: settings of the dataset.
    """

    def __init__(self, source: Any, location: str, folder: Path = Path(), limits: ImageLimits = NO_LIMITS):
        self._source, self.location, self._folder, self._limits = source, location, folder, limits
        self._is_shared = False  # whether the source is a PIL image

    def size(self) -> tuple[int, int]:
        """Width and height of the decoded image. Only the header is read. Raises MediaError: no such file, no image, or
        one that is not supported."""
        image = self._open()
        try:
            with self._exclusive():
                if image.format == "TIFF":  # load() rotates it; before, `size` depends on the release
                    image.load()
                rotated = image.getexif().get(0x0112) in _ROTATED
        except Exception as error:  # Pillow raises errors of many types for damaged files
            raise self._damaged(error) from error
        return self._limits.resized(*(image.size[::-1] if rotated else image.size))

    def decode(self) -> "Image":
        """The image as RGB: rotated as its EXIF data says, transparent parts white, resized to the limits. Raises
        MediaError as `size`, and for a truncated or damaged file."""
        from PIL import Image, ImageOps

        image = self._open()
        try:
            with self._exclusive():
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
        source = self._load_source(self._source)
        image = self._parse(source) if isinstance(source, bytes) else source
        if image.format in EXTERNAL_FORMATS:
            raise self._error(f"expected an image (PNG, JPEG, WebP, ...), found {image.format}: convert the file")
        width, height = image.size
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
        try:
            with self._exclusive():
                frames = getattr(image, "n_frames", 1)  # only the formats with several frames have it
        except Exception as error:  # as above
            raise self._damaged(error) from error
        if frames > 1 and image.format != "MPO":  # MPO: a photo with a preview, the photo first
            raise self._error(
                f"expected one frame, found an animation ({image.format}) of {frames} frames: save the frame to use, "
                "or move it to the column of videos (data.video_key)"
            )
        return image

    def _exclusive(self) -> AbstractContextManager[Any]:
        """A context for reading pixels: rows may share a PIL image, which only one thread may read."""
        return _LOADING if self._is_shared else nullcontext()

    def _parse(self, data: bytes) -> "Image":
        from PIL import Image, UnidentifiedImageError

        if not data:
            raise self._error("expected an image, found 0 bytes: write the file again, or remove the row")
        try:
            return Image.open(io.BytesIO(data))
        except UnidentifiedImageError as error:
            raise self._error(
                f"expected an image (PNG, JPEG, WebP, ...), found {len(data):,} bytes of another kind, which start "
                f"with {data[:16]!r}: convert the file, or remove the row"
            ) from error
        except Image.DecompressionBombError as error:
            raise self._error(f"expected at most {MOST_PIXELS:,} pixels ({error}): store a smaller image") from error
        except Exception as error:  # as above
            raise self._damaged(error) from error

    def _load_source(self, source: Any) -> "Image | bytes":
        """The bytes of the image, or the image itself."""
        from PIL import Image

        if isinstance(source, Image.Image):
            self._is_shared = True
            return source
        if (data := load_media(source, self._folder, self._error)) is not None:
            return data
        if (
            isinstance(source, np.ndarray)
            and source.dtype == np.uint8
            and source.ndim >= 2
            and source.shape[2:] in _CHANNELS
        ):
            return Image.fromarray(source.squeeze(-1) if source.shape[2:] == (1,) else source)
        if isinstance(source, Mapping):
            for key in _SOURCE_KEYS:
                if source.get(key) is not None:
                    return self._load_source(source[key])
        raise self._error(f"expected {_SOURCES}, found {describe(source)}")

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

    def _error(self, problem: str) -> MediaError:
        path = self._source.get("path") if isinstance(self._source, Mapping) else self._source
        has_name = isinstance(path, str) and len(path) < 300 and path[:5].lower() != "data:"
        return MediaError(f"{self.location}{f' ({path:.100})' if has_name else ''}: {problem}")


def process_image(image: Any, image_patch_size: int = 14) -> "Image":
    """The image of a source in RGB, under the name of public verl. Limits of a dict (min_pixels, max_pixels) apply;
    the size in patches is left to the processor of the model."""
    limits = {name: image.get(name) for name in ("min_pixels", "max_pixels")} if isinstance(image, Mapping) else {}
    return RowImage(image, "process_image", limits=ImageLimits(**limits)).decode()


# ---- bytes of images and videos --------------------------------------------------------------------------------------


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
