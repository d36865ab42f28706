"""examples/ppo_trainer/train_local.py trains; models and data that do not fit are all named in one message."""

import json
from pathlib import Path

import pytest

from examples.ppo_trainer import train_local
from examples.quickstart.tiny_model import tiny_model
from verl.trainer.local_trainer import LocalPPOTrainer

ROOT = Path(__file__).parents[2]


def test_the_script_trains(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    settings = {
        "data.train_files": f"[{tiny / 'train.jsonl'}]",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 8,
        "data.max_response_length": 6,
        "actor_rollout.model_name_or_path": tiny / "model",
        "critic.model_name_or_path": tiny / "model",
        "reward.custom_reward_function.path": tiny / "reward.py",
        "reward.isolation": "none",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "critic.ppo_mini_batch_size": 4,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": -1,
        "trainer.save_at_end": "false",
        "trainer.default_local_dir": tmp_path / "run",
    }
    metrics = train_local.main([f"{key}={value}" for key, value in settings.items()])
    assert metrics["training/global_step"] == 2 and "critic/vf_loss" in metrics


def test_all_problems_of_models_and_data_are_in_one_message(tmp_path):
    """A critic with another tokenizer, and rows without a ground truth."""
    tiny_model("llama", tmp_path / "policy", seed=0)
    tiny_model("qwen2", tmp_path / "critic", size="tiny")
    rows = [{"prompt": f"{letter}="} for letter in "abcdefgh"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "train_batch_size": 4, "max_prompt_length": 8},
        "actor_rollout": {"model_name_or_path": str(tmp_path / "policy")},
        "critic": {"model_name_or_path": str(tmp_path / "critic"), "ppo_mini_batch_size": 4},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}},
        "algorithm": {"name": "ppo"},
        "trainer": {"default_local_dir": str(tmp_path / "run")},
    }
    with pytest.raises(ValueError, match="2 problems of model and data") as error:
        LocalPPOTrainer(config)
    assert "critic" in str(error.value) and "tokenizer" in str(error.value) and "ground truth" in str(error.value)
