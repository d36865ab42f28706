"""Runs of a vision-language model on images, from files to checkpoints."""

import json
import os
import re
import subprocess
import sys

import pytest
from PIL import Image, ImageDraw

from tests.pages import ROOT
from tests.vl_models import save_llava, save_vl_model
from verl import PPOTrainer, SFTTrainer
from verl.evaluation.generate import GenerationRun
from verl.tracking.report import write_report
from verl.trainer.output.samples import step_record

COLORS = {"a": (220, 30, 30), "b": (30, 30, 220)}


def letters(solution_str, ground_truth, data_source, extra_info=None):
    """The share of letters."""
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A folder with a tiny model, images, and files of prompts with and without one."""
    folder = tmp_path_factory.mktemp("vision")
    save_vl_model("qwen2_vl", folder / "model")
    rows = []
    for i in range(8):
        name = "ab"[i % 2]
        image = Image.new("RGB", (16 + 8 * (i % 3), 16), (255, 255, 255))
        ImageDraw.Draw(image).rectangle((4, 4, 12, 12), COLORS[name])
        image.save(folder / f"{i}.png")
        rows.append({"prompt": "<image>?", "answer": name, "images": [f"{i}.png"]})
    rows[5] = {"prompt": "?", "answer": "a", "images": []}
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    sft = [{"prompt": r["prompt"], "response": r["answer"], "images": r["images"]} for r in rows]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sft))
    return folder


def settings(vision, run, **more):
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": str(vision / "train.jsonl"),
        "data.val_files": str(vision / "test.jsonl"),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 4,
        "actor_rollout_ref.model.path": str(vision / "model"),
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "reward.isolation": "none",
        "trainer.default_local_dir": str(run),
        "trainer.logger": ["jsonl"],
        "trainer.val_before_train": False,
        "trainer.test_freq": 2,
        "trainer.log_val_generations": 3,
        "trainer.total_training_steps": 2,
        **more,
    }


@pytest.mark.fast("native")
@pytest.mark.parametrize("engine", ["hf", "native"])
def test_grpo_on_images(vision, tmp_path, monkeypatch, engine):
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")
    config = settings(vision, tmp_path / "run", **{"actor_rollout_ref.rollout.name": engine})
    trainer = PPOTrainer(config, reward_fn=letters)
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["rollout/logprob_gap_max"] for line in lines if "rollout/logprob_gap_max" in line]
    assert len(gaps) == 2 and max(gaps) < 1e-4  # sampling and training see the same images
    shown = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[-1])["rows"]
    assert all(row["images"][0].startswith("data:image/png;base64,") for row in shown)
    page = write_report(tmp_path / "run").read_text()
    assert shown[0]["images"][0] in page
    batch = trainer.batch
    batch.batch["token_level_scores"].zero_()
    record = step_record(batch, trainer.tokenizer, 1, seed=0)["groups"]
    has_image = [bool(data) for data in batch.non_tensor_batch["multi_modal_data"]][::2]
    assert [bool(example["images"]) for example in record["examples"]] == has_image[: len(record["examples"])]
    assert trainer.generate([[{"role": "user", "content": [{"type": "image", "image": str(vision / "0.png")}]}]])


@pytest.mark.slow
def test_a_model_without_its_own_code_runs_on_the_generic_path(vision, tmp_path):
    """`AutoModelForImageTextToText` with padded sequences and rollout.name=hf; other engines refuse it."""
    save_llava(tmp_path / "llava")
    more = {"actor_rollout_ref.model.path": str(tmp_path / "llava"), "trainer.test_freq": -1}
    PPOTrainer(settings(vision, tmp_path / "run", **more), reward_fn=letters).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["rollout/logprob_gap_max"] < 1e-4 for line in lines)
    assert all(line["actor/grad_norm"] > 0 for line in lines)


def sft(vision, run, **more) -> SFTTrainer:
    file = str(vision / "sft.jsonl")
    data = {"train_files": file, "val_files": file, "train_batch_size": 4, "max_length": 64}
    trainer = {"default_local_dir": str(run), "logger": ["jsonl"]}
    return SFTTrainer({"data": data, "model.path": str(vision / "model"), "trainer": trainer, **more})


def test_sft_validates_a_batch_of_images_at_a_time(vision, tmp_path):
    """The loss is that of all rows at once, also if the last batch is smaller."""
    losses, sizes = [], []
    for size in (8, 3):
        trainer = sft(vision, tmp_path / "run", **{"data.train_batch_size": size, "trainer.total_training_steps": 1})
        inputs = trainer.run.inputs
        collate = inputs.collate
        inputs.collate = lambda items, collate=collate: sizes.append(len(items)) or collate(items)
        losses.append(trainer.validate()["val/loss"])
    assert sizes == [8, 3, 3, 2] and losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_sft_on_images(vision, tmp_path):
    trainer = sft(vision, tmp_path / "run", **{"optim.lr": 1e-2, "trainer.total_training_steps": 6})
    before = trainer.validate()["val/loss"]
    trainer.fit()
    assert trainer.validate()["val/loss"] < before


@pytest.mark.slow
@pytest.mark.parametrize("control", ["none", "shuffled"])
def test_the_script_learns_to_count_and_its_control_does_not(control, tmp_path):
    script = ROOT / "examples" / "grpo_trainer" / "run_tiny_vl_local.sh"
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "CONTROL": control}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=True)
    last = done.stdout.strip().splitlines()[-1]
    before, after = map(float, re.fullmatch(r"test accuracy: (\S+) before .*, (\S+) after 40 steps", last).groups())
    assert before < 0.6 and (after > 0.9 if control == "none" else after < 0.45)


def test_the_script_keeps_a_run_and_gives_every_key_once(tmp_path):
    script = ROOT / "examples" / "grpo_trainer" / "run_tiny_vl_local.sh"
    program = tmp_path / "program"
    program.write_text('#!/usr/bin/env bash\nif [ "$2" = verl.trainer.main_ppo ]; then printf "%s\\n" "${@:3}"; fi\n')
    program.chmod(0o755)
    env = os.environ | {"PYTHON": str(program), "OUT": str(tmp_path / "out")}
    command = ["bash", str(script), "trainer.log_val_generations=0", "data.train_batch_size=8"]
    given = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert given[-2:] == command[2:]
    keys = [setting.partition("=")[0] for setting in given]
    assert len(keys) == len(set(keys)) == 17
    run = tmp_path / "out" / "grpo-none"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()  # of a run that was interrupted
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split() == given
    (run / "global_step_40").mkdir()
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split() == given
    done = subprocess.run(command[:2], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{run} has a finished run: remove this folder, or set OUT=FOLDER")


def test_offline_generation_on_images(vision, tmp_path):
    out = tmp_path / "out.jsonl"
    settings = {"data.path": vision / "test.jsonl", "data.output_path": out, "model.path": vision / "model"}
    settings |= {"rollout.name": "hf", "rollout.response_length": 3, "rollout.prompt_length": 64}
    GenerationRun(overrides=[f"{key}={value}" for key, value in settings.items()]).run()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(line["responses"]) for line in lines] == [1, 1, 1]
    # the paths of the input, which are relative to its folder, are those of the same files in the output
    assert [line["images"] for line in lines] == [[str(vision / f"{i}.png")] for i in range(3)]
    settings["rollout.prompt_length"] = 4
    with pytest.raises(ValueError, match=r"longer than 4 tokens.*: raise the limit, reduce data.max_pixels, or remove"):
        GenerationRun(overrides=[f"{key}={value}" for key, value in settings.items()]).run()
