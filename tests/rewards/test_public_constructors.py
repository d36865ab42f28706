"""Reward managers and the default score function under their public paths, as users' code constructs and calls them."""

import logging

import pytest
import torch
from verl.utils.reward_score import default_compute_score

from tests.rewards.test_reward_managers import make_batch, tokenizer  # noqa: F401 (a fixture)
from verl.rewards import load_reward_manager

RESULTS = [
    ("openai/gsm8k", "#### 4", "4", 1.0),
    ("openai/gsm8k", "#### 5", "4", 0.0),
    ("lighteval/MATH", r"\boxed{4}", "4", 1.0),
    ("numina_aops_forum", r"\boxed{5}", "4", 0.0),
    ("searchR1_nq", "<answer>Paris</answer>", {"target": ["Paris"]}, 1.0),
    ("cais/mmlu", "B", "B", 1.0),
    ("math_dapo", "Answer: 4", "4", {"score": 1.0, "acc": 1.0, "pred": "4"}),
    ("aime_2024", "Answer: 5", "4", {"score": -1.0, "acc": 0.0, "pred": "5"}),
]


@pytest.mark.parametrize(("source", "response", "truth", "expected"), RESULTS)
def test_the_default_score_is_a_number_where_it_is_one_in_public_verl(source, response, truth, expected):
    keywords = {"sandbox_fusion_url": None, "concurrent_semaphore": None, "memory_limit_mb": None, "reward_router": 1}
    result = default_compute_score(source, response, truth, extra_info={"index": 0}, **keywords)
    assert result == expected and type(result) is type(expected)


def test_a_data_source_without_a_rule():
    with pytest.raises(NotImplementedError, match="no reward rule for data_source 'mine'"):
        default_compute_score("mine", "4", "4")


MANAGERS = """
import torch
from verl import DataProto
from verl.workers.reward_manager import {base}


class Scored({base}):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs)

    def __call__(self, data: DataProto, return_dict: bool = False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            item = data[i]
            rewards[i, 0] = float(
                self.compute_score(
                    data_source=item.non_tensor_batch["data_source"],
                    solution_str=self.tokenizer.decode(item.batch["responses"], skip_special_tokens=True),
                    ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                    extra_info=item.non_tensor_batch.get("extra_info"),
                )
            )
        return {{"reward_tensor": rewards, "reward_extra_info": {{}}}} if return_dict else rewards
"""
BATCH = make_batch(["a", "b", "c"], ["A", "C", "C"], sources=["cais/mmlu"] * 3)


@pytest.mark.parametrize("base", ["NaiveRewardManager", "DAPORewardManager", "PrimeRewardManager"])
def test_a_subclass_of_a_public_manager(tokenizer, tmp_path, base):  # noqa: F811
    (tmp_path / "managers.py").write_text(MANAGERS.format(base=base))
    manager = load_reward_manager(tokenizer, manager="Scored", manager_path=str(tmp_path / "managers.py"))
    assert manager(BATCH).sum(1).tolist() == [1.0, 0.0, 1.0]


def test_the_public_constructors(tokenizer):  # noqa: F811
    from verl.workers.reward_manager import BatchRewardManager, DAPORewardManager, NaiveRewardManager

    def reverse(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str.upper() != ground_truth)

    assert NaiveRewardManager(tokenizer, 0)(BATCH).sum(1).tolist() == [1.0, 0.0, 1.0]
    assert NaiveRewardManager(tokenizer, 0, compute_score=reverse)(BATCH).sum(1).tolist() == [0.0, 1.0, 0.0]
    buffer = {"enable": True, "len": 1, "penalty_factor": 1.0, "log": False}
    dapo = DAPORewardManager(tokenizer, 0, reverse, max_resp_len=1, overlong_buffer_cfg=buffer)
    assert dapo(BATCH).sum(1).tolist() == [-1.0, 0.0, -1.0]  # one token of at most one: the whole penalty

    def score_all(data_sources, solution_strs, ground_truths, extra_infos):
        return [len(solution_strs)] * len(solution_strs)

    assert BatchRewardManager(tokenizer, 0, score_all)(BATCH).sum(1).tolist() == [3.0, 3.0, 3.0]


HIDES = """
import torch


class Hides:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"):
        self.tokenizer, self.compute_score = tokenizer, compute_score

    def __call__(self, data, return_dict=False):
        scores = []
        for i in range(len(data)):
            item = data[i].non_tensor_batch
            text = self.tokenizer.decode(data[i].batch["responses"], skip_special_tokens=True)
            try:
                scores.append(float({read}))
            except Exception:
                scores.append(0.0)
        return torch.tensor(scores)
"""
CALL = 'self.compute_score(item["data_source"], text, item["reward_model"]["ground_truth"])'


@pytest.mark.parametrize(("read", "scores"), [(CALL + '["score"]', [0.0, 0.0, 0.0]), (CALL, [1.0, 0.0, 1.0])])
def test_an_error_that_a_manager_hides_is_one_warning(tokenizer, tmp_path, caplog, read, scores):  # noqa: F811
    (tmp_path / "managers.py").write_text(HIDES.format(read=read))
    manager = load_reward_manager(tokenizer, manager="Hides", manager_path=str(tmp_path / "managers.py"))
    with caplog.at_level(logging.WARNING):
        assert manager(BATCH).sum(1).tolist() == scores
        assert torch.equal(manager(BATCH), manager(BATCH))
    messages = [record.message for record in caplog.records if "except clause" in record.message]
    assert len(messages) == (scores == [0.0] * 3)
    assert all(
        "Hides.__call__ gave every sample of a batch the reward 0" in m and "scores from 0 to 1" in m for m in messages
    )


def test_equal_scores_alone_are_no_warning(tokenizer, tmp_path, caplog):  # noqa: F811
    (tmp_path / "managers.py").write_text(HIDES.format(read=CALL))
    manager = load_reward_manager(tokenizer, manager="Hides", manager_path=str(tmp_path / "managers.py"))
    with caplog.at_level(logging.WARNING):
        assert manager(make_batch(["a", "b"], ["D", "D"], sources=["cais/mmlu"] * 2)).sum() == 0
    assert not caplog.records
