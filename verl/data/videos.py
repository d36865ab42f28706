"""Videos of data files: lists of frames, animated images, and files that PyAV decodes."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.images import NO_LIMITS, ImageLimits, MediaError, RowImage

DEFAULT_FPS = 2.0
"""Frames per second of a list of frames that has no `fps`: that of Qwen-VL."""


class Video:
    """A video of a row, decoded by `decode`.

    Args:
        source: a list of frames (each as a `RowImage` takes it), a uint8 array (T, H, W, 3), bytes or a path of an
            animated GIF, WebP or PNG or of a video file, or {"video": ..., "fps": ...}.
        where: names the video in errors.
        folder: the folder that relative paths start from.
        limits: settings of the frames.
        max_frames: frames to keep, evenly spaced; None: all.
    """

    def __init__(
        self,
        source: Any,
        where: str,
        folder: Path = Path(),
        limits: ImageLimits = NO_LIMITS,
        max_frames: int | None = None,
    ):
        self.where, self._folder, self._limits, self._max_frames = where, folder, limits, max_frames
        self._fps: float | None = None
        if isinstance(source, Mapping) and source.get("video") is not None:
            self._fps = source.get("fps")
            source = source["video"]
        self._source = source

    def decode(self) -> tuple[np.ndarray, float]:
        """The frames (T, H, W, 3) uint8 and their number per second.

        Raises:
            MediaError: no such file, no frames, frames of different sizes, or a file that nothing here decodes.
        """
        if isinstance(self._source, np.ndarray) and self._source.ndim == 4:
            return self._chosen(list(self._source), self._fps or DEFAULT_FPS)
        if isinstance(self._source, Sequence) and not isinstance(self._source, str | bytes | bytearray):
            return self._chosen(self._source, self._fps or DEFAULT_FPS)
        data = self._bytes()
        frames, fps = self._animation(data) or self._video_file(data)
        return self._chosen(frames, self._fps or fps)

    def _chosen(self, frames: Sequence[Any], fps: float) -> tuple[np.ndarray, float]:
        """Decode at most `max_frames` frames, evenly spaced."""
        if not len(frames):
            raise MediaError(f"{self.where}: expected at least one frame, found none")
        kept = range(len(frames))
        if self._max_frames is not None and len(frames) > self._max_frames:
            kept = np.linspace(0, len(frames) - 1, self._max_frames).round().astype(int)
            fps *= len(kept) / len(frames)
        decoded = [
            np.asarray(RowImage(frames[i], f"{self.where}, frame {i}", self._folder, self._limits).decode())
            for i in kept
        ]
        sizes = {frame.shape for frame in decoded}
        if len(sizes) > 1:
            raise MediaError(f"{self.where}: expected frames of one size, found the shapes {sorted(sizes)}")
        return np.stack(decoded), fps

    def _bytes(self) -> bytes:
        source = self._source
        if isinstance(source, Mapping):
            source = next((source[key] for key in ("bytes", "path") if source.get(key) is not None), None)
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if not isinstance(source, str | Path):
            raise MediaError(
                f"{self.where}: expected a list of frames, bytes, a path, or a dict with 'video', 'bytes' or 'path', "
                f"found {source!r:.200}"
            )
        if re.match(r"https?://", str(source)):
            raise MediaError(f"{self.where}: expected a file, found the URL {source!s:.100}: download the video")
        path = self._folder / Path(str(source).removeprefix("file://")).expanduser()
        if not path.is_file():
            raise MediaError(
                f"{self.where}: expected a file {str(source)!r:.200} (in {self._folder.resolve()}), found no such file"
            )
        return path.read_bytes()

    def _animation(self, data: bytes) -> tuple[list[Any], float] | None:
        """Frames of an image with several frames and their number per second; None for another file."""
        from PIL import Image, ImageSequence, UnidentifiedImageError

        try:
            image = Image.open(io.BytesIO(data))
        except UnidentifiedImageError:
            return None
        frames = [frame.convert("RGBA") for frame in ImageSequence.Iterator(image)]
        milliseconds = image.info.get("duration") or 1000 / DEFAULT_FPS
        return frames, 1000 / milliseconds

    def _video_file(self, data: bytes) -> tuple[list[Any], float]:
        try:
            import av
        except ModuleNotFoundError as error:
            raise MediaError(
                f"{self.where}: expected a list of frames or an animated image, found a file of {len(data):,} bytes "
                "that Pillow does not read; video files need PyAV: pip install av"
            ) from error
        try:
            with av.open(io.BytesIO(data)) as container:
                fps = float(container.streams.video[0].average_rate or DEFAULT_FPS)
                return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)], fps
        except (av.error.FFmpegError, IndexError) as error:
            raise MediaError(f"{self.where}: expected a video, found a file PyAV does not read: {error}") from error
