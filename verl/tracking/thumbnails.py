"""Small copies of the images of a prompt, for samples in files, trackers and reports."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

MAX_IMAGES = 4
"""Images of a sample that are shown."""
SIDE = 128
"""Pixels of the longer side of a thumbnail."""
_PREFIX = "data:image/"


def thumbnails(data: Mapping[str, Any] | None) -> list[str]:
    """Data URIs of the first images of a prompt, or of the first frames of its videos; of a few kB each.

    Args:
        data: an entry of the column multi_modal_data; None in a text-only row.
    """
    return [thumbnail(image) for image in _images(data or {})[:MAX_IMAGES]]


def _images(data: Mapping[str, Any]) -> list[Any]:
    from PIL import Image

    videos = (video[0] if isinstance(video, tuple) else video for video in data.get("videos", ()))
    return [*data.get("images", ()), *(Image.fromarray(frames[0]) for frames in videos)]


def thumbnail(image: Any) -> str:
    """A data URI of a PIL image: PNG if that is small, otherwise JPEG."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    buffers = {image_format: io.BytesIO() for image_format in ("png", "jpeg")}
    small.save(buffers["png"], "PNG")
    small.save(buffers["jpeg"], "JPEG", quality=80)
    image_format = "png" if buffers["png"].tell() <= max(2048, buffers["jpeg"].tell()) else "jpeg"
    return f"{_PREFIX}{image_format};base64,{base64.b64encode(buffers[image_format].getvalue()).decode()}"


def are_thumbnails(value: Any) -> bool:
    """Whether a field of a sample is a list of thumbnails."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(isinstance(item, str) and item.startswith(_PREFIX) for item in value)


def decode_thumbnail(uri: str) -> Any:
    """The PIL image of a thumbnail."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
