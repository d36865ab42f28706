"""verl/trainer/output/metrics.py: the metrics of a batch and of a validation, with figures worked out by hand."""

import json
import math
import statistics

import numpy as np
import pytest
import torch

from tests.trainer.conftest import make_tiny
from verl.protocol import DataProto
from verl.trainer.output import metrics as functions
from verl.trainer.sft import SFTTrainer


def batch(uids: str = "aab", **columns: list) -> DataProto:
    """Three samples: prompts of 1, 2 and 2 tokens, responses of 4 (one of a tool), 2 and 0 tokens."""
    tensors = {
        "prompts": [[0, 0, 7], [0, 7, 7], [0, 7, 7]],
        "responses": [[5, 5, 5, 5], [5, 5, 0, 0], [0, 0, 0, 0]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0]],
        "response_mask": [[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]],
        "token_level_scores": [[0.0, 0.5, 0.0, 1.0], [0.25, 0.25, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
        "token_level_rewards": [[0.0, 0.25, 0.0, 2.0], [-1.0, 0.25, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
        **columns,
    }
    return DataProto.from_dict({name: torch.tensor(rows) for name, rows in tensors.items()}, {"uid": list(uids)})


def test_the_epoch_of_a_step_is_that_of_its_rows(tmp_path):
    """24 rows, 2 steps of 12 per epoch."""
    tiny = make_tiny(tmp_path)
    trainer = {"total_training_steps": 3, "default_local_dir": str(tmp_path / "run"), "logger": ["jsonl"]}
    data = {"train_files": [str(tiny / "train.jsonl")], "train_batch_size": 12}
    config = {"model": {"path": str(tiny / "model")}, "data": data, "trainer": trainer | {"save_at_end": False}}
    SFTTrainer(config).fit()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["training/epoch"] for line in lines if "training/epoch" in line] == [0, 0, 1]


def test_scores_and_rewards_are_sums_and_lengths_are_counts():
    assert functions.data_metrics(batch()) == pytest.approx(
        {
            # 1.5, 0.5 and 0
            "critic/score/mean": 2 / 3,
            "critic/score/max": 1.5,
            "critic/score/min": 0.0,
            # 2.25, -0.75 and 0
            "critic/rewards/mean": 0.5,
            "critic/rewards/max": 2.25,
            "critic/rewards/min": -0.75,
            # 4, 2 and 0 tokens, that of the tool included
            "response_length/mean": 2.0,
            "response_length/max": 4.0,
            "response_length/min": 0.0,
            "prompt_length/mean": 5 / 3,
            "prompt_length/max": 2.0,
            "prompt_length/min": 1.0,
            "response/aborted_ratio": 1 / 3,
            # the samples of "a" differ; "b" has one sample only
            "reward/tied_groups": 0.0,
        }
    )


def test_columns_of_tokens_are_reported_over_the_tokens_of_the_policy():
    far = 1000.0  # where response_mask is 0
    columns = {
        "advantages": [[1.0, 2.0, far, 4.0], [-3.0, 0.5, far, far], [far] * 4],
        "returns": [[1.0, 3.0, far, 2.0], [0.0, 5.0, far, far], [far] * 4],
        "values": [[0.5, 2.0, far, 2.5], [1.0, 3.0, far, far], [-far] * 4],
        "old_log_probs": [[-1.0, -1.0, far, -1.0], [-1.0, -1.0, far, far], [far] * 4],
        "ref_log_prob": [[-1.5, -1.0, -far, -1.0], [-1.0, -1.0, far, far], [far] * 4],
    }
    found = functions.data_metrics(batch(**columns))
    spread = {name: [found[f"critic/{name}/{kind}"] for kind in ("mean", "max", "min")] for name in list(columns)[:3]}
    assert spread["advantages"] == pytest.approx([0.9, 4.0, -3.0])
    assert spread["returns"] == pytest.approx([2.2, 5.0, 0.0])
    assert spread["values"] == pytest.approx([1.8, 3.0, 0.5])
    errors, returns = [0.5, 1.0, -0.5, -1.0, 2.0], [1.0, 3.0, 2.0, 0.0, 5.0]
    unexplained = statistics.variance(errors) / (statistics.variance(returns) + 1e-5)
    assert found["critic/vf_explained_var"] == pytest.approx(1 - unexplained, rel=1e-5) != pytest.approx(1.0)
    # one of five tokens differs, by 0.5: exp(-0.5) - 1 + 0.5
    assert found["actor/ref_kl"] == pytest.approx((math.exp(-0.5) - 0.5) / 5)


def test_groups_with_one_score():
    samples = DataProto.concat([batch("aac"), batch("bcb"), batch("ded")])  # scores of 1.5, 0.5 and 0 each
    samples.batch["token_level_scores"][[3, 5, 6, 8]] = 0.25
    # a and c differ, b and d do not, e has one sample
    assert functions.data_metrics(samples)["reward/tied_groups"] == 2 / 4
    assert "reward/tied_groups" not in functions.data_metrics(batch("abc"))


def test_timings_and_throughput_per_process():
    assert functions.timing_metrics({"gen": 3.0, "adv": 0.5}, step=4.0, tokens=600, world_size=3) == {
        "timing_s/gen": 3.0,
        "timing_s/adv": 0.5,
        "timing_s/step": 4.0,
        "perf/total_num_tokens": 600,
        "perf/time_per_step": 4.0,
        "perf/throughput": 50.0,
    }


def test_a_validation_of_several_samples_per_prompt():
    found = functions.validation_metrics(
        np.array(["x", "x", "x", "x", "x", "x", "y"]),
        np.array(["p", "p", "p", "q", "q", "q", "r"]),
        {"acc": np.array([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]), "reward": np.arange(7.0)},
        np.array(["2", "3", "3", "9", "8", "7", "1"], dtype=object),
    )
    assert found == pytest.approx(
        {
            "val-core/x/acc/mean@3": (2 / 3 + 1 / 3) / 2,
            "val-core/x/acc/best@3": 1.0,
            "val-aux/x/acc/worst@3": 0.0,
            "val-aux/x/acc/std@3": math.sqrt(2) / 3,
            # "3" twice: 1.0; on a tie the first, "9": 0.0
            "val-core/x/acc/maj@3": 0.5,
            "val-aux/x/reward/mean@3": 2.5,
            "val-aux/x/reward/best@3": 3.5,
            "val-aux/x/reward/worst@3": 1.5,
            "val-aux/x/reward/std@3": math.sqrt(2 / 3),
            "val-aux/x/reward/maj@3": 2.0,
            "val-core/y/acc/mean@1": 1.0,
            "val-aux/y/reward/mean@1": 6.0,
        }
    )
    assert functions.validation_metrics(np.array(["y"]), np.array(["r"]), {"reward": np.array([2.0])}) == {
        "val-core/y/reward/mean@1": 2.0
    }


def test_numeric_columns_and_predictions_of_several_batches(caplog):
    def scored(scores: list, **columns: list) -> DataProto:
        arrays = {name: np.array(values, dtype=object) for name, values in columns.items()}
        return DataProto.from_dict({"token_level_scores": torch.tensor(scores)}, arrays)

    first = scored([[1.0, 0.5], [0.0, 0.25]], reward_acc=[True, 0], reward_note=["a", 1], reward_model=[1, 2])
    second = scored([[2.0, 0.0]], reward_acc=[np.float32(0.5)], reward_note=["b"], reward_model=[3], reward_pred=["7"])
    found = functions.numeric_columns([first, second])
    assert {name: values.tolist() for name, values in found.items()} == {
        "reward": [1.5, 0.25, 2.0],
        "acc": [1.0, 0.0, 0.5],
    }
    assert [record.getMessage() for record in caplog.records] == [
        "'note' is a number in only 1 of 3 rows: it is not reported"
    ]
    assert functions.predictions([first, second]) is None
    assert functions.predictions([second, second]).tolist() == ["7", "7"]
