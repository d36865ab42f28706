"""Videos: every kind of source, one clear error for every kind of bad video, and what the processor makes of them.

Tests of the processor need torchvision, those of video files PyAV.
"""

import base64
import io
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.conftest import written
from tests.vl_models import PATCH, QWEN, make_config, video, video_patches
from verl.data import videos
from verl.data.images import ImageLimits, MediaError
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.videos import Video
from verl.modeling.positions import multimodal_positions

needs_torchvision = pytest.mark.skipif(not find_spec("torchvision"), reason="needs torchvision")
needs_av = pytest.mark.skipif(not find_spec("av"), reason="needs PyAV")


def plain(value: int = 255, width: int = 12, height: int = 8) -> Image.Image:
    return Image.new("RGB", (width, height), (value, 0, 200 - value // 2))


def animated(kind: str = "GIF") -> bytes:
    """5 frames, 10 per second."""
    frames = [plain(i) for i in range(0, 200, 40)]
    return written(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, lossless=True)


def encoded(path: Path) -> bytes:
    """An MP4 file of 12 frames of 32 x 16 pixels, 6 per second, that get brighter by 20; its header comes first."""
    import av

    with av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=6)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for i in range(12):
            shown = np.full((16, 32, 3), 20 * i, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        container.mux(stream.encode())
    return path.read_bytes()


# ---- sources --------------------------------------------------------------------------------------------------------


def test_a_video_is_frames_or_an_animation(tmp_path):
    frames = [plain(i) for i in range(6)]
    (tmp_path / "a.gif").write_bytes(animated())
    found = Video([written(frame) for frame in frames], "x").decode()
    assert found.frames.shape == (6, 8, 12, 3) and found.frames[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.fps == 2 and found.indices == list(range(6))
    assert Video({"video": frames, "fps": 4}, "x").decode().fps == 4
    listed = Video(np.array([written(frame) for frame in frames], dtype=object), "x").decode()  # as pandas has it
    assert np.array_equal(listed.frames, found.frames)
    uri = "data:image/gif;base64," + base64.b64encode(animated()).decode()
    kinds = (animated("PNG"), animated("WEBP"), uri)
    for source in (animated(), "a.gif", {"bytes": animated()}, {"path": "a.gif"}, *kinds):
        found = Video(source, "x", tmp_path).decode()
        assert found.frames.shape == (5, 8, 12, 3) and found.fps == 10
        assert found.frames[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160]


def test_frames_are_chosen_evenly():
    frames = [plain(i) for i in range(9)]
    found = Video(frames, "x", max_frames=3).decode()
    assert found.frames[:, 0, 0, 0].tolist() == [0, 4, 8] == found.indices
    assert (found.total, found.fps) == (9, 2)
    assert Video(animated(), "x", max_frames=2).decode().frames[:, 0, 0, 0].tolist() == [0, 160]
    small = Video(frames, "x", limits=ImageLimits(max_pixels=24)).decode()  # of 8 x 12: half of each side
    assert small.frames.shape == (9, 4, 6, 3)


@needs_av
def test_a_video_file_keeps_only_the_chosen_frames(tmp_path):
    data = encoded(tmp_path / "a.mp4")
    found = Video(data, "x").decode()
    assert found.frames.shape == (12, 16, 32, 3) and (found.total, found.fps) == (12, 6)
    assert np.abs(found.frames[:, 0, 0, 0].astype(int) - 20 * np.arange(12)).max() < 6  # a lossy format
    found = Video(data, "x", max_frames=4, limits=ImageLimits(max_pixels=128)).decode()
    assert found.indices == [0, 4, 7, 11] and found.frames.shape == (4, 8, 16, 3)
    assert np.abs(found.frames[:, 0, 0, 0].astype(int) - 20 * np.array([0, 4, 7, 11])).max() < 6


# ---- errors ---------------------------------------------------------------------------------------------------------


def truncated_gif() -> bytes:
    noise = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (40, 40, 3), np.uint8)) for i in range(4)]
    data = written(noise[0], "GIF", save_all=True, append_images=noise[1:])
    return data[: len(data) - 700]


def bomb() -> bytes:
    """A GIF whose header says that it has 400 million pixels."""
    data = bytearray(written(plain(), "GIF"))
    data[6:10] = struct.pack("<HH", 20_000, 20_000)
    return bytes(data)


@pytest.mark.parametrize(
    "source, message",
    [
        ([], "expected at least one frame, found none"),
        (np.zeros((0, 8, 8, 3), np.uint8), "expected at least one frame, found none"),
        ([plain(), plain(width=20)], "expected frames of one size"),
        ([plain(), b""], "row 3, frame 1: .*found 0 bytes"),
        ("no.mp4", "expected a file 'no.mp4'.*no such file"),
        (b"", "expected a video, found 0 bytes"),
        ("https://a.example/b.mp4", "found the URL .*download the file"),
        (b"\0\0\0 ftypisom", "video files need PyAV: pip install av"),
        (7, "expected a list of frames, bytes, a path"),
        ({"clip": "a.mp4"}, "found a dict with the keys clip"),
        ("\u00e9" * 300, "found File name too long"),
        (truncated_gif(), "row 3: expected a complete video, found a damaged file"),
        (bomb(), "exceeds limit"),
        ({"video": [plain()], "fps": 0}, "expected fps, frames per second, above 0, found 0"),
        ({"video": [plain()], "fps": -2.0}, "found -2.0"),
        ({"video": [plain()], "fps": "2"}, "found '2'"),
    ],
)
def test_bad_videos(source, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)  # not installed
    with pytest.raises(MediaError, match=message):
        Video(source, "row 3").decode()


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(videos, "MOST_VIDEO_PIXELS", 400)
    with pytest.raises(MediaError, match=r"at most 400 pixels, found 5 frames of 12 x 8 = 480: set data.max_video"):
        Video(animated(), "x").decode()
    assert len(Video(animated(), "x", max_frames=4).decode().frames) == 4


@needs_av
def test_bad_video_files(tmp_path):
    data = encoded(tmp_path / "a.mp4")
    for bad, message in ((data[:300], "without a video stream"), (b"\0\0\0 ftypisom" + bytes(500), "a damaged file")):
        with pytest.raises(MediaError, match=f"row 3: expected a .*video, found .*{message}"):
            Video(bad, "row 3").decode()
    with pytest.raises(MediaError, match=r"row 3: expected 12 frames, as the header says, found the end after frame"):
        Video(data[:-60], "row 3").decode()  # its header is complete
    import av

    sound = io.BytesIO()
    with av.open(sound, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(MediaError, match="found a file without a video stream"):
        Video(sound.getvalue(), "row 3").decode()


# ---- rows -----------------------------------------------------------------------------------------------------------


def row(*clips: Any, prompt: str = "<video>What?") -> dict[str, Any]:
    return {"prompt": prompt, "answer": "3", "videos": list(clips)}


@needs_torchvision
@pytest.mark.parametrize("family", QWEN)
def test_an_item_has_the_patches_and_times_of_its_video(models, family):
    tokenizer, processor = models(family)
    clip = video(1, 9, 24, 16)
    clips = [Image.fromarray(frame.numpy()) for frame in clip]
    rows = [row({"video": clips, "fps": 4})]
    item = RLHFDataset(rows, tokenizer, {"max_prompt_length": 300, "max_video_frames": 6}, processor=processor)[0]
    kept = [0, 2, 3, 5, 6, 8]  # 9 frames, 6 of them; 2 are one grid of 4 x 6 patches
    expected, grid = video_patches(clip[kept])
    inputs = item["multi_modal_inputs"]
    assert inputs["video_grid_thw"].tolist() == [list(grid)] == [[3, 4, 6]]
    about = processor.video_processor
    mean, std = (torch.tensor(x).repeat_interleave(2 * PATCH * PATCH) for x in (about.image_mean, about.image_std))
    assert torch.allclose(inputs["pixel_values_videos"], ((expected + 1) / 2 - mean) / std, atol=1e-5)
    assert item["prompt_ids"].count(processor.video_token_id) == 18
    assert item["raw_prompt_ids"].count(processor.video_token_id) == 1
    shown, metadata = item["multi_modal_data"]["videos"][0]
    assert np.array_equal(shown, clip[kept].numpy())
    assert (metadata["fps"], metadata["frames_indices"], metadata["total_num_frames"]) == (4, kept, 9)
    if family == "qwen2_5_vl":  # 6 of 9 frames are left of 4 per second: 2 of them are 0.75 s
        assert inputs["second_per_grid_ts"].tolist() == [0.75]
    if family == "qwen3_vl":  # the mean time of two frames: (0 + 2) / 2 / 4, (3 + 5) / 2 / 4, (6 + 8) / 2 / 4
        text = tokenizer.decode(item["prompt_ids"])
        assert [text.index(f"<{time} seconds>") for time in ("0.2", "1.0", "1.8")]


@needs_torchvision
@pytest.mark.parametrize("family", QWEN)
def test_positions_of_an_item_are_those_of_transformers(models, family):
    from transformers import AutoModelForImageTextToText

    config = make_config(family)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    tokenizer, processor = models(family)
    for seed, (frames, fps) in enumerate([(2, 1), (4, 4), (6, 8), (5, 10)]):
        clips = [Image.fromarray(f.numpy()) for f in video(seed, frames, 48, 16)]
        both = row({"video": clips, "fps": fps}, clips[:2], prompt="a <video> b <video><image>c")
        rows = [both | {"images": [clips[0]]}]
        item = RLHFDataset(rows, tokenizer, {"max_prompt_length": 400}, processor=processor)[0]
        ids, inputs = torch.tensor([item["prompt_ids"]]), item["multi_modal_inputs"]
        types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        given = {name: inputs[name] for name in names if name in inputs}
        assert len(given) == 2 + (family == "qwen2_5_vl")
        expected, _ = model.get_rope_index(ids, types, **given)
        assert torch.equal(multimodal_positions(config, ids[0], inputs), expected[:, 0])


@pytest.mark.parametrize(
    "bad, message",
    [
        (row(), "expected one entry in the column 'videos' for each <video> of the prompt, found 1"),
        (row([plain()], [plain()]), "found 1 in the prompt and 2 in the column"),
        (row("no.mp4"), r"row 1 .*, video 0: expected a file 'no.mp4'"),
        (row(truncated_gif()), r"row 1 .*, video 0: expected a complete video, found a damaged file"),
        (row([plain(), b"x"]), r"row 1 .*, video 0, frame 1: expected an image"),
    ],
)
def test_bad_rows_name_the_row(models, bad, message):
    tokenizer, processor = models("qwen2_5_vl")
    with pytest.raises(ValueError, match=message):
        RLHFDataset([row(prompt="?"), bad], tokenizer, {"max_prompt_length": 300}, processor=processor)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="without torchvision")
def test_without_torchvision_videos_are_an_error(models):
    tokenizer, processor = models("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"row 0 .*videos need the package torchvision.*pip install"):
        RLHFDataset([row([plain()] * 4)], tokenizer, {"max_prompt_length": 300}, processor=processor)
