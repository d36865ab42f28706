"""Images: every kind of source, and one clear error for every kind of bad image."""

import base64
import os
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import written
from verl.data.images import ImageLimits, MediaError, RowImage

RED = (255, 0, 0)


def plain(width: int = 12, height: int = 8, mode: str = "RGB", color=RED) -> Image.Image:
    return Image.new(mode, (width, height), color)


def animated(kind: str = "GIF") -> bytes:
    frames = [plain(color=(i, 0, 200 - i)) for i in range(0, 200, 40)]
    return written(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header says that it has many pixels."""
    data = bytearray(written(plain()))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize(
    "source",
    [
        written(plain()),
        {"bytes": written(plain()), "path": None},
        {"bytes": None, "path": "a.png"},
        {"image": "a.png"},
        {"image": plain()},
        {"type": "image", "image_url": {"url": "a.png"}},
        "a.png",
        Path("a.png"),
        "data:image/png;base64," + base64.b64encode(written(plain())).decode(),
        base64.b64encode(written(plain())).decode(),
        plain(),
        "DATA:image/png;base64," + base64.b64encode(written(plain())).decode().replace("=", "%3D"),
        np.asarray(plain()),
        bytearray(written(plain())),
    ],
)
def test_every_kind_of_source_is_the_same_image(source, tmp_path):
    (tmp_path / "a.png").write_bytes(written(plain()))
    found = RowImage(source, "row 3", tmp_path)
    assert found.size() == (12, 8)
    image = found.decode()
    assert image.mode == "RGB" and image.size == (12, 8) and image.getpixel((0, 0)) == RED


def test_two_threads_share_an_image():
    """One at a time reads its pixels, which Pillow does on first use."""
    image, inside, most = plain(), [], []
    load = image.load

    def alone():
        inside.append(None)
        time.sleep(0.02)
        most.append(len(inside))
        inside.pop()
        return load()

    image.load = alone
    with ThreadPoolExecutor(2) as pool:
        rows = [RowImage(image, "row 3"), RowImage({"image": image}, "row 4")]
        found = list(pool.map(RowImage.decode, rows))
    assert max(most) == 1 and all(each.getpixel((0, 0)) == RED for each in found)


def test_a_file_uri_is_an_absolute_path(tmp_path):
    (tmp_path / "a.png").write_bytes(written(plain()))
    assert RowImage(f"file://{tmp_path}/a.png", "row 3").size() == (12, 8)


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def noise(size: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8))


BAD = {
    "truncated png": (half(written(noise())), "expected a complete image, found a damaged file"),
    "truncated jpeg": (half(written(noise(), "JPEG")), "expected a complete image, found a damaged file .*truncated"),
    "one pixel": (written(plain(1, 1)), "expected at least 4 pixels on each side, found 1 x 1"),
    "bomb": (bomb(20_000, 20_000), r"at most 89,478,485 pixels \(Image size \(400000000 pixels\) exceeds limit"),
    "large": (bomb(10_000, 9_000), "found 10000 x 9000 = 90,000,000: store a smaller image"),
    "empty": (b"", "found 0 bytes"),
    "text": (b"hello, I am text alone", "22 bytes of another kind, which start with b'hello, I am text'"),
    "gif": (animated(), r"expected one frame, found an animation \(GIF\) of 5 frames.*data.video_key"),
    "webp": (animated("WEBP"), r"found an animation \(WEBP\) of 5 frames"),
    "missing": (
        "no/such.png",
        r"row 3 \(no/such.png\): expected a file 'no/such.png' \(in .*found no such file \(paths",
    ),
    "url": (
        "https://a.example/b.png",
        r"found the URL https://a.example/b.png: download the file",
    ),
    "base64": ("data:image/png;base64,@@", "expected base64 text"),
    "no source": ({"width": 3}, "expected bytes, a path, .*found a dict with the keys width"),
    "number": (7, "expected bytes, a path, .*found 7"),
    "text that is not ASCII": ("data:image/png;base64,\xe9", "expected base64 text, found '\xe9'"),
    "unknown user": ("~no-such-user/a.png", "expected a file .*found Could not determine home directory"),
    "null character": ("a\0.png", r"expected a file 'a\\x00.png' .*found embedded null byte"),
    "channels first": (np.zeros((3, 8, 8), np.uint8), r"found an array of shape \(3, 8, 8\) and dtype uint8"),
    "one dimension": (np.zeros(8, np.uint8), r"found an array of shape \(8,\) and dtype uint8"),
    "floats": (np.zeros((8, 8, 3)), r"found an array of shape \(8, 8, 3\) and dtype float64"),
    "program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n", "found EPS: convert the"),
    "32 bits": (Image.new("F", (8, 8)), r"expected 8 or 16 bits per channel, found 32 \(mode F\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_one_error_with_row_and_fix(name, tmp_path):
    source, message = BAD[name]
    with pytest.raises(MediaError, match=message) as raised:
        RowImage(source, "a.parquet, row 3", tmp_path).decode()
    assert str(raised.value).startswith("a.parquet, row 3") and "\n" not in str(raised.value)
    assert "(data:" not in str(raised.value)  # a file is named in parentheses, content is not


@pytest.mark.parametrize("name", [name for name in BAD if not name.startswith(("truncated", "32"))])
def test_the_header_is_enough_to_find_it(name, tmp_path):
    source, message = BAD[name]
    with pytest.raises(MediaError, match=message):
        RowImage(source, "row 3", tmp_path).size()


def test_a_path_that_is_no_file_says_what_it_is(tmp_path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "pipe.png")
    kinds = {"folder": "a folder", "loop": "Too many levels of symbolic links", "pipe": "a device, pipe or socket"}
    for name, kind in kinds.items():
        with pytest.raises(MediaError, match=f"expected a file '{name}.png' .*, found {kind}"):
            RowImage(f"{name}.png", "row 3", tmp_path).size()


def test_damaged_exif_data_are_an_error_with_the_row():
    image = written(Image.new("RGB", (8, 4)), exif=b"not EXIF at all")
    with pytest.raises(MediaError, match=r"^row 3: expected a complete image, found a damaged file"):
        RowImage(image, "row 3").size()


def test_a_text_file_with_the_name_of_an_image(tmp_path):
    (tmp_path / "a.png").write_text("PNG, honestly")
    with pytest.raises(MediaError, match=r"row 3 \(a.png\): .*start with b'PNG, honestly'"):
        RowImage("a.png", "row 3", tmp_path).size()


def test_transparent_parts_are_white():
    hidden = Image.new("RGBA", (8, 8), (*RED, 0))  # red, but invisible
    palette = hidden.convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    grey = Image.new("LA", (8, 8), (0, 128))
    assert RowImage(written(hidden), "x").decode().getpixel((0, 0)) == (255, 255, 255)
    assert RowImage(written(palette), "x").decode().getpixel((0, 0)) == (255, 255, 255)
    assert RowImage(written(grey), "x").decode().getpixel((0, 0)) == (127, 127, 127)


def test_other_modes():
    cmyk = RowImage(written(plain(mode="CMYK", color=(0, 255, 255, 0)), "JPEG", quality=95), "x").decode()
    assert np.allclose(cmyk.getpixel((3, 3)), RED, atol=8)
    grey16 = Image.fromarray(np.full((8, 8), 0x8001, dtype=np.uint16))
    assert RowImage(written(grey16), "x").decode().getpixel((0, 0)) == (128, 128, 128)
    assert RowImage(written(plain(mode="1", color=1)), "x").decode().getpixel((0, 0)) == (255, 255, 255)
    assert RowImage(written(plain(mode="L", color=9)), "x").decode().getpixel((0, 0)) == (9, 9, 9)


def test_the_exif_orientation_is_applied():
    image = plain(12, 8, color=(0, 0, 255))
    image.paste(RED, (0, 0, 6, 8))  # left half
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise: left becomes top
    for kind in ("PNG", "TIFF"):  # Pillow rotates TIFF files itself
        source = RowImage(written(image, kind, exif=exif), "x")
        found = source.decode()
        assert source.size() == found.size == (8, 12)
        assert found.getpixel((4, 1)) == RED and found.getpixel((4, 10)) == (0, 0, 255)


def test_limits_of_pixels():
    small, large = ImageLimits(min_pixels=400), ImageLimits(max_pixels=48)
    for limits, expected in ((small, (25, 17)), (large, (8, 5))):  # 12 x 8 times sqrt(400 / 96) and sqrt(1 / 2)
        image = RowImage(written(plain()), "x", limits=limits)
        assert image.size() == image.decode().size == expected
    assert RowImage(plain(), "x", limits=ImageLimits(96, 96)).size() == (12, 8)
