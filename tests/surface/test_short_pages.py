"""Commands of the pages on models, data, images, adapters, reward models, preferences and SFT run as printed."""

import json
import shlex
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from scripts import memory_page
from tests.pages import DOCS, as_module, blocks, commands, table_rows
from verl.trainer.local_trainer import LocalPPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")


@pytest.mark.slow
def test_parallelism(shell):
    """Each run is read, checked and compiled; tests of the executors run what they say."""
    pytest.importorskip("ray")
    from verl.trainer.ray_trainer import RayPPOTrainer

    shapes = set()
    for command in commands("parallelism.md"):
        words = shlex.split(as_module(command))
        if words[:3] == ["python", "-m", "verl.trainer.main_ppo"]:
            assert words[3] == "--config"
            trainer_class = RayPPOTrainer if "trainer.backend=ray" in words else LocalPPOTrainer
            trainer = trainer_class(config_path=words[4], overrides=words[5:])
            shapes.add((trainer.world_size, len(trainer.pools), trainer.config.trainer.backend))
        elif words[1] != "examples/migration/train.py":  # test_migration.py runs these
            shell.run(command)
    assert shapes == {(1, 1, "local"), (2, 1, "local"), (2, 1, "ray"), (4, 1, "local"), (4, 3, "local")}


@pytest.mark.fast("lora.md")
@pytest.mark.parametrize("page", ["lora.md", pytest.param("preferences.md", marks=pytest.mark.slow), "sft.md"])
def test_training(page, shell, caplog):
    for command in commands(page):
        shell.run(command)
    assert page != "lora.md" or load_file("tiny/with-adapters/model.safetensors")
    assert "is deprecated" not in caplog.text


@pytest.mark.slow
def test_reward_models(shell, caplog):
    *here, apart = commands("reward_models.md")
    for command in here:
        shell.run(command)
    words = shlex.split(as_module(apart))[4:]  # tests/trainer/test_reward_model_run.py runs what it says
    assert len(LocalPPOTrainer(config_path=words[0], overrides=words[1:]).pools) == 2
    assert "HAS NO EFFECT" not in caplog.text and "is deprecated" not in caplog.text


@pytest.mark.slow
def test_distillation(shell, caplog):
    *here, apart = commands("distillation.md")
    for command in here:
        shell.run(command)
    words = shlex.split(as_module(apart))[4:]  # tests/trainer/test_distillation.py runs what it says
    assert len(LocalPPOTrainer(config_path=words[0], overrides=words[1:]).pools) == 2
    assert "without effect" not in caplog.text


def test_data_format(shell, caplog, monkeypatch):
    *here, strict = commands("data_format.md")
    for command in here:
        shell.run(command)
    variable, command = strict.split(" ", 1)
    monkeypatch.setenv(*variable.split("="))
    shell.run(command)
    assert "is deprecated" not in caplog.text


@pytest.mark.parametrize("page", ["data.md", "choose.md", "debug_rewards.md"])
def test_the_guide(page, shell):
    shell.monkeypatch.syspath_prepend(str(Path.cwd()))
    for command in commands(page):
        shell.run(command)


def test_own_images(shell, capsys):
    shell.monkeypatch.syspath_prepend(str(Path.cwd()))
    for command in commands("vlm.md"):
        shell.run(command)
    rows = [json.loads(line) for line in Path("data/colors/train.jsonl").read_text().splitlines()]
    pixels = [Image.open(Path("data/colors", *row["images"])).getpixel((0, 0)) for row in rows]
    assert pixels == [(255, 0, 0), (0, 0, 255)]
    shown = capsys.readouterr().out
    assert "would train 2 steps of grpo from data/tiny-vl" in shown and "\n  images: 1, 32 x 32\n" in shown
    assert "<|image_pad|><|vision_end|>Which color?" in shown and not Path("checkpoints").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_model_of_the_tutorial_learns(shell, capsys):
    pytest.importorskip("matplotlib")
    shell.monkeypatch.syspath_prepend(str(Path.cwd()))
    for command in commands("tutorial.md"):
        shell.run(command)
    printed = capsys.readouterr().out
    assert Path("sort/train.jsonl").read_text().startswith(blocks("tutorial.md", "text")[0])
    assert "{'score': 1.0, 'acc': 1.0, 'same_digits': 1.0} {'score': 0.1, 'acc': 0.0, 'same_digits': 1.0}" in printed
    records = [json.loads(line) for line in Path("sort/runs/grpo/metrics.jsonl").read_text().splitlines()]
    scores = [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
    assert len(scores) == 60 and sum(scores[-10:]) / 10 > sum(scores[:10]) / 10 + 0.3
    report = json.loads(Path("sort/after.eval.json").read_text())
    assert report["comparison"]["overall"]["prompts"] == 200
    after, before = report["evaluated"]["overall"]["metrics"], report["compared_with"]["overall"]["metrics"]
    assert after["accuracy"]["value"] > before["accuracy"]["value"] + 0.3
    assert Path("sort/compare.png").stat().st_size > 10_000 and Path("sort/runs/grpo/report.html").is_file()
    assert "5466=4566" in printed


def test_memory(shell, capsys):
    """The command of the page, and rows of its table: what is printed now."""
    for command in commands("memory.md"):
        shell.run(command)
    assert "fits into 79.1 GiB (H100)" in capsys.readouterr().out
    rows = {tuple(row[:2]): row[2:] for row in table_rows((DOCS / "memory.md").read_text()) if len(row) == 6}
    assert len(rows) == len(memory_page.MODELS) * len(memory_page.METHODS)
    for (model, method), gpu in {("1.5B", "all weights"): "H100", ("7B", "QLoRA"): "RTX-4090"}.items():
        assert rows[model, method][[*memory_page.GPUS].index(gpu)] == memory_page.cell(model, gpu, method)
