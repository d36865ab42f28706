"""Runs of a vision-language model on videos, which need torchvision."""

import json
import random
from importlib.util import find_spec

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.trainer.test_vision_run import letters, settings
from tests.vl_models import make_config, save_vl_model
from verl import PPOTrainer, SFTTrainer

pytestmark = pytest.mark.skipif(not find_spec("torchvision"), reason="needs torchvision")


def write_rows(path, rows: int, seed: int) -> None:
    """Videos that get brighter (answer a) or darker (b): their frames differ in the order only."""
    draw, lines = random.Random(seed), []
    for i in range(rows):
        color = [draw.randrange(100, 256) for _ in range(3)]
        shades = range(4) if i % 2 == 0 else range(3, -1, -1)
        name = f"{path.stem}{i}"
        for k, shade in enumerate(shades):
            Image.new("RGB", (16, 16), tuple(c * shade // 3 for c in color)).save(path.with_name(f"{name}_{k}.png"))
        video = {"video": [f"{name}_{k}.png" for k in range(4)], "fps": 2}
        lines.append({"prompt": "<video>?", "response": "ab"[i % 2], "answer": "ab"[i % 2], "videos": [video]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    write_rows(folder / "train.jsonl", 64, 0)
    write_rows(folder / "test.jsonl", 16, 1)
    return folder


@pytest.mark.parametrize("engine", ["hf", "native"])
def test_grpo_on_videos(folder, tmp_path, monkeypatch, engine):
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")
    save_vl_model("qwen2_5_vl", folder / "model")
    more = {"actor_rollout_ref.rollout.name": engine, "data.val_files": [], "trainer.test_freq": -1}
    PPOTrainer(settings(folder, tmp_path / "run", **more), reward_fn=letters).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["rollout/logprob_gap_max"] for line in lines if "rollout/logprob_gap_max" in line]
    assert len(gaps) == 2 and max(gaps) < 1e-4  # sampling and training see the same frames at the same times


@pytest.mark.slow
def test_sft_learns_from_the_order_of_frames(folder, tmp_path):
    model = save_vl_model("qwen2_5_vl", tmp_path / "model", weights=False)
    AutoModelForImageTextToText.from_config(make_config("qwen2_5_vl", 16)).save_pretrained(model)
    data = {"train_files": str(folder / "train.jsonl"), "val_files": str(folder / "test.jsonl")}
    data |= {"train_batch_size": 32, "max_length": 64}
    run = {"default_local_dir": str(tmp_path / "run"), "logger": ["jsonl"], "total_training_steps": 80}
    trainer = SFTTrainer({"data": data, "model.path": model, "optim.lr": 5e-3, "trainer": run})
    trainer.fit()
    # a response is a letter and the end of the turn; guessing the letter costs log(2) / 2 = 0.35 per token
    assert trainer.validate()["val/loss"] < 0.1
