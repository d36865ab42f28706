"""verl rm: the first loss, the loss against a plain classifier, that it learns, resume, merge, LoRA, and use in RL."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.recipe.checks import assert_same_on_two_processes
from tests.trainer.conftest import make_tiny, run_settings
from tests.trainer.runs import fit, lines
from verl.cli.programs import merge
from verl.recipe.rm import RMTrainer
from verl.recipe.rm.main_rm import main


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Rows that prefer a text that begins with a to one that begins with b."""
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    for name in ("train", "test"):
        rows = lines(folder / f"{name}.jsonl")
        pairs = [{"prompt": r["prompt"], "chosen": "a" + r["answer"], "rejected": "b" + r["answer"]} for r in rows]
        write(folder / f"{name}_pairs.jsonl", [{**pair, "margin": 0.5} for pair in pairs])
    return folder


@pytest.fixture
def settings(tiny, tmp_path):
    return [
        f"data.train_files={tiny / 'train_pairs.jsonl'}",
        f"data.val_files={tiny / 'test_pairs.jsonl'}",
        "data.train_batch_size=4",
        f"model.path={tiny / 'model'}",
        "optim.lr=3e-3",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.logger=[jsonl]",
        "trainer.save_at_end=false",
        "trainer.val_before_train=false",
    ]


def scores(folder, rows):
    """Of a plain classifier, each dialogue alone. rows: of a batch, where a dialogue is the prompt."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    width = rows["prompts"].shape[1]
    dialogues = zip(rows["prompts"], rows["attention_mask"][:, :width].bool())
    return torch.stack([model(ids[real][None]).logits[0, 0] for ids, real in dialogues]).detach()


def test_the_loss_of_a_step_is_that_of_a_plain_classifier(settings):
    run = [*settings, "trainer.save_freq=2", "trainer.total_training_steps=3", "rm.center_coef=0.1"]
    trainer, reports = fit(run, RMTrainer)
    assert [op.name for op in trainer.pipeline.operators] == ["rows", "update"]
    first = -math.log(1 / (1 + math.exp(0.5)))  # both scores are 0, the margin is 0.5
    assert reports[0].metrics["train/loss"] == pytest.approx(first, rel=1e-5)
    folder = trainer.checkpoints.latest().parent / "global_step_2" / "actor" / "huggingface"
    values = scores(folder, reports[2].batch.tensors)
    better, worse = values[0::2], values[1::2]
    expected = (-(better - worse - 0.5).sigmoid().log() + 0.1 * (better + worse) ** 2).mean()
    assert reports[2].metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert reports[2].metrics["rewards/margins"] == pytest.approx((better - worse).mean().item(), rel=1e-3)


def test_it_learns_the_preference_and_rewards_it_in_rl(tiny, settings, tmp_path):
    trainer, _ = fit([*settings, "trainer.total_training_steps=24", "trainer.save_freq=24"], RMTrainer)
    metrics = trainer.validate()
    assert metrics["val/rewards/accuracies"] == 1.0 and metrics["val/loss"] < 0.5
    folder = trainer.checkpoints.latest() / "actor" / "huggingface"
    rl = [each for each in run_settings(tiny, tmp_path / "rl") if not each.startswith("reward.custom")]
    model = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={folder}"]
    _, reports = fit([*rl, *model, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1"])
    rows = reports[0].batch.tensors
    width = rows["prompts"].shape[1]
    dialogues = {"prompts": rows["input_ids"], "attention_mask": rows["attention_mask"]}
    assert dialogues["prompts"].shape[1] > width
    assert rows["token_level_scores"].sum(1).tolist() == pytest.approx(
        scores(folder, dialogues).tolist(), rel=1e-3, abs=1e-4
    )


@pytest.mark.slow
def test_a_reward_model_is_trained_further(settings):
    trainer, reports = fit([*settings, "trainer.total_training_steps=8", "trainer.save_freq=8"], RMTrainer)
    folder = trainer.checkpoints.latest() / "actor" / "huggingface"
    further = [each for each in settings if not each.startswith(("model.path", "trainer.default_local_dir"))]
    further += [f"model.path={folder}", f"trainer.default_local_dir={folder.parents[2]}-2"]
    _, again = fit([*further, "trainer.total_training_steps=1"], RMTrainer)
    assert again[0].metrics["train/loss"] < reports[0].metrics["train/loss"]


def merged(folder, tmp_path):
    """The folder that `verl merge` writes of a checkpoint."""
    target = tmp_path / "merged"
    keys = {"--backend": "fsdp", "--local_dir": folder, "--target_dir": target}
    assert merge([str(word) for pair in keys.items() for word in pair], "verl merge") == 0
    return target


@pytest.mark.slow
def test_lora_trains_the_head_too(settings, tmp_path):
    pytest.importorskip("peft")
    lora = ["model.lora_rank=4", "model.lora_alpha=8", "trainer.total_training_steps=4", "trainer.save_freq=4"]
    trainer, reports = fit([*settings, *lora], RMTrainer)
    assert reports[3].metrics["train/loss"] < reports[0].metrics["train/loss"]
    folder = merged(trainer.checkpoints.latest() / "actor", tmp_path)
    assert load_file(folder / "model.safetensors")["score.weight"].abs().sum() > 0
    assert scores(folder, reports[3].batch.tensors).std() > 0


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(settings, tmp_path):
    run = [*settings, "optim.lr=1e-4", "trainer.save_freq=2"]
    trainer, reports = assert_same_on_two_processes(run, RMTrainer, "train/loss", "train/grad_norm")
    folders = (
        merged(trainer.checkpoints.latest() / "actor", tmp_path),
        tmp_path / "run/1/global_step_2/actor/huggingface",
    )
    found = [scores(folder, reports[1].batch.tensors) for folder in folders]
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-5)


def test_settings_that_cannot_be_used(tiny, settings, capsys):
    labels = [{"prompt": "a", "completion": "b", "label": True}] * 4
    write(tiny / "labels.jsonl", labels)
    for further, message in (
        (f"data.train_files={tiny / 'labels.jsonl'}", "responses with a label, but the loss bradley_terry reads pairs"),
        ("engine.strategy=megatron", "megatron does not train reward models"),
        ("data.messages_key=chosen", "has no effect on preferences"),
    ):
        assert main([*settings, further], "verl rm") == 1
        assert message in capsys.readouterr().err
