"""Rewards given as objects, and by what they take: functions of the whole batch, data without ground truth."""

import json
from pathlib import Path

import pytest
import torch

from verl.rewards import RewardError
from verl.trainer.local_trainer import LocalPPOTrainer


def steps(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_function_of_the_batch_is_the_reward(settings, tmp_path):
    validated = []

    def reward_fn(batch):
        return torch.where(batch.batch["response_mask"] == 1, 0.25, 0.0)

    def val_reward_fn(data):
        validated.append(len(data))
        return torch.ones(len(data))

    few = [*settings, "trainer.total_training_steps=1", "trainer.test_freq=1"]
    trainer = LocalPPOTrainer(overrides=few, reward_fn=reward_fn, val_reward_fn=val_reward_fn)
    trainer.fit()
    step = dict(item for line in steps(tmp_path / "run") for item in line.items())
    assert step["critic/score/mean"] == pytest.approx(0.25 * step["response_length/mean"])
    assert validated == [6]
    assert [value for name, value in step.items() if name.startswith("val-core/jsonl/reward/mean")] == [1.0]


def test_scores_of_width_t_minus_1_are_explained(settings):
    def reward_fn(batch):
        return torch.zeros(batch.batch["responses"].shape)[:, :-1]

    with pytest.raises(RewardError, match=r"reward_fn\(\) at .*: position t is that of response token t, the last one"):
        LocalPPOTrainer(overrides=settings, reward_fn=reward_fn)


def test_two_rewards_are_refused(settings):
    with pytest.raises(ValueError, match="reward_manager and reward_fn are the same argument"):
        LocalPPOTrainer(overrides=settings, reward_fn=len, reward_manager=len)


def test_prompts_alone_are_enough_for_a_function_that_compares_nothing(settings, tmp_path):
    rows = [json.dumps({"prompt": f"{letter}="}) + "\n" for letter in "abcdefgh"]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    few = [f"data.train_files={tmp_path / 'prompts.jsonl'}", "trainer.total_training_steps=1", "data.val_files=[]"]
    LocalPPOTrainer(overrides=[*settings, *few]).fit()
    assert 0 <= steps(tmp_path / "run")[0]["critic/score/mean"] <= 1
