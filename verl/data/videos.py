"""Videos of data files: lists of frames, animated images, and files that PyAV decodes."""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.images import (
    EXTERNAL_FORMATS,
    MOST_PIXELS,
    NO_LIMITS,
    ImageLimits,
    MediaError,
    RowImage,
    describe,
    load_media,
)

DEFAULT_FPS = 2.0
"""Frames per second of a list of frames that has no `fps`: that of Qwen-VL."""
MOST_VIDEO_PIXELS = 10 * MOST_PIXELS
"""Videos whose kept frames have more pixels are refused before they are decoded: 2.7 GB."""

_SHORTER = "set data.max_video_frames or data.max_pixels, or store a smaller video"


@dataclass(frozen=True)
class DecodedVideo:
    """Frames of a video.

    Attributes:
        frames: (T, H, W, 3) uint8.
        fps: frames per second of the whole video.
        indices: (T,) which frames of the whole video these are.
        total: number of frames of the whole video.
    """

    frames: np.ndarray
    fps: float
    indices: list[int]
    total: int

    @property
    def metadata(self) -> dict[str, Any]:
        """`video_metadata` of transformers' processors; vLLM reads the same keys."""
        return {
            "total_num_frames": self.total,
            "fps": self.fps,
            "duration": self.total / self.fps,
            "frames_indices": self.indices,
            "height": self.frames.shape[1],
            "width": self.frames.shape[2],
        }


@dataclass(frozen=True)
class _Source:
    """A video before its frames are decoded. frames: indices, ascending -> these frames."""

    total: int
    fps: float
    frames: Callable[[Sequence[int]], Iterator[Any]]


class Video:
    """A video of a row, decoded by `decode`.

    Args:
        source: a list of frames (each as a `RowImage` takes it), a uint8 array (T, H, W, 3), bytes or a path of an
            animated GIF, WebP or PNG or of a video file, or {"video": ..., "fps": ...}.
        location: names the video in errors.
        folder: the folder that relative paths start from.
        limits: settings of the frames.
        max_frames: frames to keep, evenly spaced; None: all.
    """

    def __init__(
        self,
        source: Any,
        location: str,
        folder: Path = Path(),
        limits: ImageLimits = NO_LIMITS,
        max_frames: int | None = None,
    ):
        self.location, self._folder, self._limits, self._max_frames = location, folder, limits, max_frames
        self._fps: Any = None
        if isinstance(source, Mapping) and source.get("video") is not None:
            self._fps = source.get("fps")
            source = source["video"]
        self._source = source

    def decode(self) -> DecodedVideo:
        """Decode at most `max_frames` frames, evenly spaced. The others are not kept in memory. Raises MediaError: no
        such file, no frames, too many pixels, frames of different sizes, a damaged file, or one that nothing here
        decodes."""
        source = self._opened()
        if not source.total:
            raise self._error("expected at least one frame, found none")
        fps = source.fps if self._fps is None else self._fps
        if isinstance(fps, bool) or not isinstance(fps, int | float | np.number) or not 0 < fps < math.inf:
            raise self._error(f"expected fps, frames per second, above 0, found {fps!r:.80}")
        kept: Sequence[int] = range(source.total)
        if self._max_frames is not None and source.total > self._max_frames:
            kept = np.linspace(0, source.total - 1, self._max_frames).round().astype(int).tolist()
        frames: list[np.ndarray] = []
        for index, frame in zip(kept, source.frames(kept)):
            image = RowImage(frame, f"{self.location}, frame {index}", self._folder, self._limits)
            width, height = (0, 0) if frames else image.size()
            if (pixels := len(kept) * width * height) > MOST_VIDEO_PIXELS:
                raise self._error(
                    f"expected at most {MOST_VIDEO_PIXELS:,} pixels, found {len(kept):,} frames of {width} x {height} "
                    f"= {pixels:,}: {_SHORTER}"
                )
            frames.append(np.asarray(image.decode()))
        if len(frames) < len(kept):
            raise MediaError(
                f"{self.location}: expected {source.total} frames, as the header says, found the end after frame "
                f"{kept[len(frames) - 1] if frames else 0}: the file is truncated. Write it again or remove the row"
            )
        sizes = {frame.shape for frame in frames}
        if len(sizes) > 1:
            raise self._error(f"expected frames of one size, found the shapes {sorted(sizes)}")
        return DecodedVideo(np.stack(frames), float(fps), list(kept), source.total)

    # ---- sources ----------------------------------------------------------------------------------------------------

    def _opened(self) -> _Source:
        source = self._source
        is_array = isinstance(source, np.ndarray) and (source.ndim == 4 or source.dtype == object)
        if is_array or (isinstance(source, Sequence) and not isinstance(source, str | bytes | bytearray)):
            return _Source(len(source), DEFAULT_FPS, lambda kept: (source[i] for i in kept))
        data = self._bytes()
        if not data:
            raise self._error("expected a video, found 0 bytes: write it again, or remove the row")
        return self._animation(data) or self._video_file(data)

    def _bytes(self) -> bytes:
        source = self._source
        if isinstance(source, Mapping):
            source = next((source[key] for key in ("bytes", "path", "url") if source.get(key) is not None), source)
        if (data := load_media(source, self._folder, self._error)) is not None:
            return data
        raise self._error(
            "expected a list of frames, bytes, a path, or a dict with 'video', 'bytes', 'path' or 'url', found "
            f"{describe(source)}"
        )

    def _animation(self, data: bytes) -> _Source | None:
        """The frames of an image; None for another file."""
        from PIL import Image, UnidentifiedImageError

        try:
            image = Image.open(io.BytesIO(data))
            if image.format in EXTERNAL_FORMATS:
                return None
            image.load()  # PNG and WebP have the duration with the first frame
            total, milliseconds = getattr(image, "n_frames", 1), image.info.get("duration")
        except UnidentifiedImageError:
            return None
        except Exception as error:  # Pillow raises errors of many types for damaged files
            raise self._damaged(error) from error

        def frames(kept: Sequence[int]) -> Iterator[Any]:
            for index in kept:
                try:
                    image.seek(index)
                    frame = image.convert("RGBA")
                except Exception as error:  # as above
                    raise self._damaged(error) from error
                yield frame

        return _Source(total, 1000 / (milliseconds or 1000 / DEFAULT_FPS), frames)

    def _video_file(self, data: bytes) -> _Source:
        try:
            import av
        except ModuleNotFoundError as error:
            raise MediaError(
                f"{self.location}: expected a list of frames or an animated image, found a file of {len(data):,} bytes "
                "that Pillow does not read; video files need PyAV: pip install av"
            ) from error
        try:
            with av.open(io.BytesIO(data)) as container:
                if not container.streams.video:
                    raise MediaError(
                        f"{self.location}: expected a video, found a file without a video stream: it is truncated, or "
                        "has only sound. Write it again or remove the row"
                    )
                stream = container.streams.video[0]
                fps = float(stream.average_rate or DEFAULT_FPS)
                total = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        except av.error.FFmpegError as error:
            raise self._damaged(error) from error

        def frames(kept: Sequence[int]) -> Iterator[np.ndarray]:
            remaining = iter(kept)
            target = next(remaining)
            try:
                with av.open(io.BytesIO(data)) as container:
                    for index, frame in enumerate(container.decode(video=0)):
                        if index != target:
                            continue
                        yield frame.to_ndarray(format="rgb24")
                        if (target := next(remaining, None)) is None:
                            return
            except av.error.FFmpegError as error:
                raise self._damaged(error) from error

        return _Source(total, fps, frames)

    def _error(self, problem: str) -> MediaError:
        return MediaError(f"{self.location}: {problem}")

    def _damaged(self, error: Exception) -> MediaError:
        return self._error(
            f"expected a complete video, found a damaged file or one that cannot be decoded ({error}): "
            "write it again or remove the row"
        )
