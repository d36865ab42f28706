"""Rewards of a run: given as objects, functions of the whole batch, isolated functions, data without ground truth."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.runs import lines
from verl.dataflow.flow import merge_reports
from verl.protocol import DataProto
from verl.rewards import RewardError
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo import operators
from verl.trainer.ppo.operators import Reward


def test_a_returned_value_is_reported_over_the_samples_for_which_it_is_a_number():
    """However the samples are divided into the passes of dynamic sampling."""

    def metric(*passes):
        reports = []
        for values in passes:
            scores = torch.zeros(len(values), 1)
            extra = {"reward_extra_info": {"distance": values}, "metrics": {}}
            scored = Reward(lambda batch, return_dict, s=scores, e=extra: {"reward_tensor": s, **e})(DataProto())
            reports.append({0: ({"metrics": scored.meta_info["metrics"], "timing": {}}, len(values))})
        return merge_reports(reports)[0]

    assert metric([1.0, 3, "far", None, True]) == {"reward/distance": 5 / 3}
    assert metric([1.0, 3], ["far", None, True]) == {"reward/distance": 5 / 3}
    assert metric([1.0, 3, True], ["far", None]) == {"reward/distance": 5 / 3}
    assert metric(["far", None], ["near"]) == {}


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
    step = dict(item for line in lines(tmp_path / "run" / "metrics.jsonl") for item in line.items())
    assert step["critic/score/mean"] == pytest.approx(0.25 * step["response_length/mean"])
    assert validated == [6]
    source = re.compile(r"val-core/tiny\d+/reward/mean")  # the folder of test.jsonl
    assert [value for name, value in step.items() if source.match(name)] == [1.0]


def test_scores_of_width_t_minus_1_are_explained(settings):
    def reward_fn(batch):
        return torch.zeros(batch.batch["responses"].shape)[:, :-1]

    with pytest.raises(RewardError, match=r"reward_fn\(\) at .*: position t is that of response token t, the last one"):
        LocalPPOTrainer(overrides=settings, reward_fn=reward_fn)


def test_prompts_alone_are_enough_for_a_function_that_compares_nothing(settings, tmp_path):
    rows = [json.dumps({"prompt": f"{letter}="}) + "\n" for letter in "abcdefgh"]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    few = [f"data.train_files={tmp_path / 'prompts.jsonl'}", "trainer.total_training_steps=1", "data.val_files=[]"]
    LocalPPOTrainer(overrides=[*settings, *few]).fit()
    assert 0 <= lines(tmp_path / "run" / "metrics.jsonl")[0]["critic/score/mean"] <= 1


DEADLY = """
import os

calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    os.chdir("/")
    if calls == {dies}:
        os._exit(5)
    return float(calls)
"""


def run_with(settings, tmp_path, monkeypatch, dies: int, *more: str) -> list[dict]:
    """Two steps in tmp_path, with a relative run folder, as a user starts them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deadly.py").write_text(DEADLY.format(dies=dies))
    own = [setting for setting in settings if "isolation" not in setting and "default_local_dir" not in setting]
    few = ["trainer.total_training_steps=2", "trainer.save_freq=2", "data.val_files=[]"]
    few += ["trainer.default_local_dir=out"]
    LocalPPOTrainer(overrides=[*own, *few, "reward.custom_reward_function.path=deadly.py", *more]).fit()
    return lines(tmp_path / "out" / "metrics.jsonl")


def test_a_reward_that_ends_its_process_is_an_error_of_the_run(settings, tmp_path, monkeypatch):
    with pytest.raises(RewardError, match=r"compute_score\(\) at .*deadly.py:\d+ ended its process.* with status 5"):
        run_with(settings, tmp_path, monkeypatch, 13)


def test_a_run_goes_on_where_failed_rewards_are_counted(settings, tmp_path, monkeypatch):
    found = run_with(settings, tmp_path, monkeypatch, 13, "reward.on_error=count", "reward.max_failure_rate=1")
    assert [step["reward/failed_rows"] for step in found] == [0.0, 1.0]  # 3 calls of the trial, 8 in the first step
    assert (tmp_path / "out" / "global_step_2" / "actor").is_dir()


def test_a_reward_in_the_process_of_the_trainer_does_not_move_the_run(settings, tmp_path, monkeypatch):
    found = run_with(settings, tmp_path, monkeypatch, -1, "reward.isolation=none")
    assert [step["critic/score/mean"] for step in found] == [7.5, 15.5]  # calls 4 to 11, 12 to 19
    assert (tmp_path / "out" / "global_step_2" / "actor").is_dir()


def test_a_token_that_the_model_does_not_have_ends_the_step(monkeypatch):
    monkeypatch.setattr(operators, "prompt_columns", lambda batch, with_columns: batch)
    batch = DataProto.from_dict({"input_ids": torch.ones(2, 1)}, meta_info={"vocab_size": 50})
    outside = DataProto.from_dict({"responses": torch.tensor([[4, 49], [50, 4]])})
    roles = {"rollout": SimpleNamespace(generate_sequences=lambda inputs: outside)}
    with pytest.raises(ValueError, match=r"sample 1: .* token id 50, but the model's vocabulary has 50 tokens"):
        operators.generate(roles, "train")(batch)
