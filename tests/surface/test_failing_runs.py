"""What goes wrong in the middle of a run says where: the stack of the function, or the operator that wrote nonsense."""

import traceback

import pytest
import torch

from verl import DataProto, DataProtoValidationError, Operator
from verl.rewards.outcome import RewardError
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.main_ppo import main

REWARD = '''
calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Right until the second step: 3 calls are the trial before training, 8 the first step."""
    global calls
    calls += 1
    return parse(solution_str) if calls > 13 else 0.5


def parse(text):
    return {}[text]
'''


def failing_reward(tmp_path, settings):
    (tmp_path / "reward.py").write_text(REWARD)
    return [*settings, f"reward.custom_reward_function.path={tmp_path / 'reward.py'}", "trainer.total_training_steps=3"]


def test_an_exception_in_a_reward_function_keeps_its_stack(settings, tmp_path):
    with pytest.raises(RewardError, match=r"(?s)raised KeyError: .*sample 2 of 8, data_source 'surface\d+'") as caught:
        main(failing_reward(tmp_path, settings))
    ours = [frame.name for frame in traceback.extract_tb(caught.tb)]
    in_step = ours[ours.index("step") :]
    assert in_step[:3] == ["step", "run", "run"]
    theirs = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert [frame.name for frame in theirs[-2:]] == ["compute_score", "parse"]
    assert theirs[-1].filename == str(tmp_path / "reward.py") and theirs[-1].line == "return {}[text]"
    assert "raised in operator 'reward'" in caught.value.__notes__
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1  # what was done is on record


def test_rows_that_cannot_be_scored_may_be_counted_instead(settings, tmp_path, steps):
    found = steps(*failing_reward(tmp_path, settings), "reward.on_error=count", "reward.max_failure_rate=1")
    assert [step["reward/failed_rows"] for step in found] == [0.0, 6.0, 8.0]
    assert [step["critic/score/mean"] for step in found] == [0.5, 0.125, 0.0]


def trainer_with(settings: list[str], after: str, operator: Operator) -> LocalPPOTrainer:
    class Trainer(LocalPPOTrainer):
        def build_flow(self):
            return super().build_flow().insert_after(after, operator)

    return Trainer(overrides=[*settings, "trainer.total_training_steps=1"])


def test_an_exception_in_an_operator_is_the_end_of_the_stack(settings):
    def broken(batch):
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing") as caught:
        trainer_with(settings, "gen", Operator("broken", broken)).fit()
    names = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert names[-4:] == ["step", "run", "run", "broken"]


def spoil(batch: DataProto) -> DataProto:
    rewards = batch.batch["token_level_rewards"].clone()
    rewards[1, 0] = float("nan")
    return DataProto.from_dict({"token_level_rewards": rewards})


def shorten(batch: DataProto) -> DataProto:
    return DataProto.from_dict({"token_level_rewards": batch.batch["token_level_rewards"][:, :-1]})


def mark(batch: DataProto) -> DataProto:
    mask = batch.batch["response_mask"]
    return DataProto.from_dict({"response_mask": torch.full_like(mask, 3)})


def beyond(batch: DataProto) -> DataProto:
    return DataProto.from_dict({"responses": torch.full_like(batch.batch["responses"], 10_000)})


@pytest.mark.parametrize(
    ("function", "column", "expected", "found"),
    [
        (spoil, "token_level_rewards", "finite", "nan"),
        (shorten, "token_level_rewards", "(B=8, T=6)", "(8, 5)"),
        (mark, "response_mask", "0 or 1", "3 at row 0"),
        (beyond, "responses", "ids from 0 to", "10000 at row 0"),
    ],
)
def test_an_operator_that_writes_nonsense_is_named(settings, monkeypatch, function, column, expected, found):
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")
    operator = Operator("rescale", function, reads=("token_level_rewards", "response_mask"), writes=(column,))
    with pytest.raises(DataProtoValidationError) as caught:
        trainer_with(settings, "reward", operator).fit()
    message = str(caught.value)
    assert message.startswith("operator 'rescale': ") and column in message
    assert expected in message and found in message, message
    line = function.__code__.co_firstlineno
    assert f"Source: {function.__name__}() at line {line} in test_failing_runs.py" in message


@pytest.mark.slow
def test_a_sound_run_passes_the_strict_check(settings, monkeypatch, steps):
    """With all columns: of a critic, a reference and validation."""
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")
    settings = [key for key in settings if not key.startswith("algorithm.adv_estimator")]
    extra = ["actor_rollout_ref.ref.enable=true", "trainer.val_before_train=true", "trainer.total_training_steps=2"]
    assert len(steps(*settings, "algorithm.name=ppo", "actor_rollout_ref.rollout.n=2", *extra)) == 3
