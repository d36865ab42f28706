"""docs/vlm.md: the commands for own images run as printed."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.pages import commands


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_commands_for_own_images(shell, capsys):
    shell.monkeypatch.syspath_prepend(str(Path.cwd()))
    for command in commands("vlm.md"):
        shell.run(command)
    rows = [json.loads(line) for line in Path("data/colors/train.jsonl").read_text().splitlines()]
    assert [Image.open(Path("data/colors", *row["images"])).getpixel((0, 0)) for row in rows] == [
        (255, 0, 0),
        (0, 0, 255),
    ]
    shown = capsys.readouterr().out
    assert "would train 2 steps of grpo from data/tiny-vl" in shown
    assert "<|image_pad|><|vision_end|>Which color?" in shown
    assert "\n  images: 1, 32 x 32\n" in shown
    assert not Path("checkpoints").exists()
