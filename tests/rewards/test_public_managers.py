"""Reward managers and scores in the form and under the paths of public verl, and functions of the whole batch."""

import asyncio
import logging
import pickle

import numpy as np
import pytest
import torch
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import BatchRewardManager, DAPORewardManager, NaiveRewardManager

from tests.rewards.test_reward_managers import SAMPLES, WIDTH, make_batch, tokenizer  # noqa: F401 (a fixture)
from verl.registry import import_module
from verl.rewards import (
    RewardError,
    as_reward_manager,
    load_reward_manager,
    register_reward_manager,
    resolve_reward_function,
)
from verl.rewards.public_managers import IsolatedFunction
from verl.rewards.sandbox.pool import Limits, ProcessPool

CONFIG = {"data": {"max_response_length": 3}}
EXAMPLE = "examples/reward_fn/public_reward_manager.py"

SINGLE = """
import inspect

from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


@register("judge")
class Judge(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer)
        self.compute_score = compute_score
        self.is_async = inspect.iscoroutinefunction(compute_score)
        self.limit = config.data.max_response_length

    async def run_single(self, data: DataProto) -> dict:
        assert len(data) == 1, "one sample"
        item = data[0]
        response_ids = item.batch["responses"]
        length = int(item.batch["attention_mask"][-response_ids.shape[-1] :].sum())
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(response_ids[:length]))
        keywords = {
            "data_source": item.non_tensor_batch["data_source"],
            "solution_str": text,
            "ground_truth": item.non_tensor_batch["reward_model"]["ground_truth"],
            "extra_info": item.non_tensor_batch.get("extra_info", {}),
        }
        score = await self.compute_score(**keywords) if self.is_async else self.compute_score(**keywords)
        return {"reward_score": score, "reward_extra_info": {"acc": score, "short": length < self.limit}}
"""


@pytest.fixture
def judge(tmp_path):
    path = tmp_path / "judge.py"
    path.write_text(SINGLE)
    return str(path)


def load(tokenizer, function="compute_score", **kwargs):  # noqa: F811
    settings = {"function_path": SAMPLES, "function_name": function, "config": CONFIG}
    return load_reward_manager(tokenizer, **(settings | kwargs))


@pytest.mark.parametrize("by_path", [False, True])
def test_a_manager_that_is_called_with_the_batch(tokenizer, by_path):  # noqa: F811
    import_module(EXAMPLE)
    names = {"manager": "BriefRewardManager", "manager_path": EXAMPLE} if by_path else {"manager": "brief"}
    scored = load(tokenizer, **names, manager_kwargs={"limit": 2, "timeout": 5.0, "on_error": "raise"})
    batch = make_batch(["abc", "cd", "a", ""], truths=["abc", "cd", "b", "c"])
    expected = torch.zeros(4, WIDTH)
    expected[0, 2], expected[1, 1] = 0.5, 1.0
    result = scored(batch, return_dict=True)
    assert torch.equal(result["reward_tensor"], expected) and torch.equal(scored(batch), expected)
    assert result["reward_extra_info"] == {"brief": [False, True, True, True]}
    assert result["metrics"] == {"reward/failed_rows": 0.0, "reward/empty_responses": 1.0}
    assert scored.compute_score.name == "compute_score"


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_manager_that_scores_single_samples(tokenizer, judge, kind, tmp_path):  # noqa: F811
    function = "compute_score(data_source, solution_str, ground_truth, extra_info=None)"
    (tmp_path / "score.py").write_text(f"{kind} {function}:\n    return float(solution_str == ground_truth)\n")
    scored = load(tokenizer, function_path=str(tmp_path / "score.py"), manager="Judge", manager_path=judge)
    batch = make_batch(["abc", "cd", "a"], truths=["abc", "x", "a"])
    result = scored(batch, return_dict=True)
    assert result["reward_tensor"].nonzero().tolist() == [[0, 2], [2, 0]]
    assert result["reward_extra_info"] == {"acc": [1.0, 0.0, 1.0], "short": [False, True, True]}


def test_a_single_sample_that_fails_is_named_or_counted(tokenizer, judge):  # noqa: F811
    import_module(judge)
    batch = make_batch(["a", "ab", "d"])
    with pytest.raises(RewardError, match=r"Judge\.run_single raised KeyError: 'no such thing as b'\n  sample 1 of 3"):
        load(tokenizer, "raises_on_b", manager="judge")(batch)
    counted = load(tokenizer, "raises_on_b", manager="judge", manager_kwargs={"on_error": "count", "failure_score": -1})
    result = counted(batch, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, -1.0, 1.0]
    assert result["metrics"]["reward/failed_rows"] == 1.0
    assert asyncio.run(asyncio.to_thread(counted, batch)).sum() == 1.0


def test_failing_samples_of_a_single_manager_are_scored_again(tokenizer, judge, monkeypatch):  # noqa: F811
    monkeypatch.setattr("verl.rewards.managers.time.sleep", lambda seconds: None)
    import_module(judge)
    failed = {"b": 2, "d": 1}  # how often a response still fails

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if failed.get(solution_str):
            failed[solution_str] -= 1
            raise ConnectionError("service is down")
        return 1.0

    def single(**kwargs):
        loaded = load(tokenizer, manager="judge", manager_kwargs=kwargs)
        loaded.manager.compute_score = compute_score
        return loaded

    batch = make_batch(["a", "b", "d"])
    assert single(retries=2)(batch).sum(1).tolist() == [1.0, 1.0, 1.0] and failed == {"b": 0, "d": 0}


@pytest.mark.parametrize("text", ["cancel", "ctrl-c", "str"])
def test_whatever_run_single_raises_is_the_outcome_of_its_sample(tokenizer, judge, text):  # noqa: F811
    import_module(judge)
    raises_any = import_module(SAMPLES).raises_any

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        return await raises_any("", text if solution_str == "b" else "a", "")

    scored = load(tokenizer, "raises_any", manager="judge", manager_kwargs={"on_error": "count", "failure_score": -1})
    scored.manager.compute_score = compute_score
    result = scored(make_batch(["a", "b", "a"]), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, -1.0, 1.0]
    assert result["metrics"]["reward/failed_rows"] == 1.0


def test_parameters_of_the_constructor(tokenizer):  # noqa: F811
    class Manager:
        def __init__(self, tokenizer, num_examine, compute_score, overlong_buffer_cfg=None, max_resp_len=None):
            self.buffer, self.limit = overlong_buffer_cfg, max_resp_len

        def __call__(self, data, return_dict=False):
            return torch.full(data.batch["responses"].shape, float(self.buffer.len + self.limit))

    register_reward_manager("mine")(Manager)
    kwargs = {"overlong_buffer": {"enable": True, "len": 3}, "max_resp_len": 4}
    assert (load(tokenizer, manager="mine", manager_kwargs=kwargs)(make_batch(["a"])) == 7.0).all()
    with pytest.raises(ValueError, match=r"Manager\(tokenizer.*cannot be constructed: .*'limits'.*reward_kwargs"):
        load(tokenizer, manager="mine", manager_kwargs={"limits": 1})
    with pytest.raises(ValueError, match="expected a subclass of RewardManager, or a class with the method"):
        register_reward_manager("other")(dict)


def test_a_function_in_a_worker_gets_its_parameters_and_further_keywords():
    """Also when a manager sends it to a process of its own."""
    pool, sample = ProcessPool(1), ("any", "a", "a")
    function = resolve_reward_function(SAMPLES, "weighted", reward_kwargs={"weight": 3.0})
    called = IsolatedFunction(function, pool, Limits(60.0))
    assert called(*sample, more=1) == pickle.loads(pickle.dumps(called))(*sample, more=1) == 3.0
    called = IsolatedFunction(resolve_reward_function(SAMPLES, "keywords"), pool, Limits(60.0))
    assert called(*sample, extra_info={}, more=1) == {"score": 1.0, "names": ["extra_info", "more"]}
    pool.close()


def per_token(batch):
    return batch.batch["response_mask"] * 0.5


def per_sample(data):
    return [float(row) for row in range(len(data))]


def test_functions_of_the_whole_batch(tokenizer, tmp_path):  # noqa: F811
    batch = make_batch(["abc", "a"])
    assert as_reward_manager(per_token, tokenizer)(batch).sum(1).tolist() == [1.5, 0.5]
    assert as_reward_manager(per_sample, tokenizer)(batch).nonzero().tolist() == [[1, 0]]
    path = tmp_path / "reward.py"
    path.write_text("def reward_fn(batch):\n    return batch.batch['response_mask'].float()\n")
    scored = load_reward_manager(tokenizer, function_path=str(path), function_name="reward_fn")
    assert scored(batch).sum(1).tolist() == [3.0, 1.0]
    assert scored.compute_score.name == "reward_fn" and not scored.compute_score.needs_ground_truth


def test_whatever_is_a_reward_can_be_given(tokenizer, judge):  # noqa: F811
    batch = make_batch(["abc", "a"], truths=["abc", "b"])
    public = import_module(EXAMPLE).BriefRewardManager(tokenizer, 0, import_module(SAMPLES).compute_score)
    for given in (public, import_module(SAMPLES).compute_score, import_module(SAMPLES).batch, load(tokenizer)):
        assert as_reward_manager(given, tokenizer)(batch).nonzero().tolist() == [[0, 2]]
    for value in (7, "reward.py", lambda x: 1.0):
        with pytest.raises(ValueError, match=r"must be callable|wrong signature"):
            as_reward_manager(value, tokenizer)


@pytest.mark.parametrize(
    "returned, message",
    [
        (torch.zeros(2, WIDTH - 1), r"shape \(2, 5\): expected \(B=2, T=6\), or \(2,\): .* do not drop a column"),
        (torch.zeros(3, WIDTH), r"shape \(3, 6\): expected \(B=2, T=6\)"),
        (np.full((2, WIDTH), np.nan), "returned nan for sample 0, token 0: expected finite numbers"),
        ({"rewards": 1}, "a dict without 'reward_tensor': it has 'rewards'"),
        ("1.0", r"returned str: expected a tensor of shape \(B=2, T=6\)"),
        ({"reward_tensor": torch.zeros(2, 6), "reward_extra_info": {"k": [1]}}, r"1 values of reward_extra_info\['k'"),
        (KeyError("k"), "raised KeyError: 'k'"),
    ],
)
def test_what_a_function_must_not_return(tokenizer, returned, message):  # noqa: F811
    def reward_fn(batch):
        if isinstance(returned, Exception):
            raise returned
        return returned

    with pytest.raises(RewardError, match=rf"reward_fn\(\) at .*test_public_managers.py:\d+ .*{message}"):
        as_reward_manager(reward_fn, tokenizer)(make_batch(["abc", "a"]), return_dict=True)


def test_all_managers_count_the_same_responses_as_empty(tokenizer, judge):  # noqa: F811
    """Those without a sampled token; the tokens of a tool are not sampled."""
    batch = make_batch(["abc", "a", "ab"])
    mask = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].clone()
    mask[1] = 0
    batch = batch.replace(response_mask=mask)
    single = load(tokenizer, manager="Judge", manager_path=judge)
    for given in (import_module(SAMPLES).compute_score, per_sample, single):
        result = as_reward_manager(given, tokenizer)(batch, return_dict=True)
        assert result["metrics"] == {"reward/failed_rows": 0.0, "reward/empty_responses": 1.0}, given


# ---- public paths ---------------------------------------------------------------------------------------------------

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
PUBLIC_BATCH = make_batch(["a", "b", "c"], ["A", "C", "C"], sources=["cais/mmlu"] * 3)


@pytest.mark.parametrize("base", ["NaiveRewardManager", "DAPORewardManager", "PrimeRewardManager"])
def test_a_subclass_of_a_public_manager(tokenizer, tmp_path, base):  # noqa: F811
    (tmp_path / "managers.py").write_text(MANAGERS.format(base=base))
    manager = load_reward_manager(tokenizer, manager="Scored", manager_path=str(tmp_path / "managers.py"))
    assert manager(PUBLIC_BATCH).sum(1).tolist() == [1.0, 0.0, 1.0]


VERIFIES = """
import torch

from verl.workers.reward_manager import {base}


class Verified({base}):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="s", overlong_buffer_cfg=None):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.bonus = overlong_buffer_cfg.len

    def verify(self, data):
        scores = super().verify(data)
        data.batch["acc"] = torch.tensor(scores)
        return [{{"score": score + self.bonus, "acc": score}} for score in scores]


def score_all(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(text.upper() == truth) for text, truth in zip(solution_strs, ground_truths)]
"""


@pytest.mark.parametrize(("base", "function"), [("BatchRewardManager", "score_all"), ("PrimeRewardManager", None)])
def test_verify_of_a_subclass_gives_the_scores(tokenizer, tmp_path, base, function):  # noqa: F811
    path = str(tmp_path / "managers.py")
    (tmp_path / "managers.py").write_text(VERIFIES.format(base=base))
    settings = {"overlong_buffer": {"len": 2}, "on_error": "raise", "timeout": None}  # the run passes those of all
    manager = load_reward_manager(
        *(tokenizer,),
        manager="Verified",
        manager_path=path,
        manager_kwargs=settings,
        function_path=function and path,
        function_name=function or "compute_score",
    )
    result = manager(PUBLIC_BATCH, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [3.0, 2.0, 3.0]
    assert result["reward_extra_info"] == {"acc": [1.0, 0.0, 1.0]} and "acc" not in PUBLIC_BATCH


def test_the_public_constructors(tokenizer):  # noqa: F811
    def reverse(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str.upper() != ground_truth)

    assert NaiveRewardManager(tokenizer, 0)(PUBLIC_BATCH).sum(1).tolist() == [1.0, 0.0, 1.0]
    assert NaiveRewardManager(tokenizer, 0, compute_score=reverse)(PUBLIC_BATCH).sum(1).tolist() == [0.0, 1.0, 0.0]
    buffer = {"enable": True, "len": 1, "penalty_factor": 1.0, "log": False}
    dapo = DAPORewardManager(tokenizer, 0, reverse, max_resp_len=1, overlong_buffer_cfg=buffer)
    assert dapo(PUBLIC_BATCH).sum(1).tolist() == [-1.0, 0.0, -1.0]  # one token of at most one: the whole penalty

    def score_all(data_sources, solution_strs, ground_truths, extra_infos):
        return [len(solution_strs)] * len(solution_strs)

    assert BatchRewardManager(tokenizer, 0, score_all)(PUBLIC_BATCH).sum(1).tolist() == [3.0, 3.0, 3.0]


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


@pytest.mark.parametrize(
    ("read", "scores", "said"),
    [
        (CALL + '["score"]', [0.0, 0.0, 0.0], "returned scores from 0 to 1"),
        (CALL.replace("text", "None"), [0.0, 0.0, 0.0], "raised in 3 calls"),
        (CALL, [1.0, 0.0, 1.0], None),
        ("0.5", [0.5, 0.5, 0.5], None),  # scores that are the manager's own: what the function would say is no matter
        ("len(text)", [1.0, 1.0, 1.0], None),
    ],
)
def test_an_error_that_a_manager_hides_is_one_warning(tokenizer, tmp_path, caplog, read, scores, said):  # noqa: F811
    (tmp_path / "managers.py").write_text(HIDES.format(read=read))
    manager = load_reward_manager(tokenizer, manager="Hides", manager_path=str(tmp_path / "managers.py"))
    with caplog.at_level(logging.WARNING):
        assert manager(PUBLIC_BATCH).sum(1).tolist() == scores
        assert torch.equal(manager(PUBLIC_BATCH), manager(PUBLIC_BATCH))
    messages = [record.message for record in caplog.records]
    assert len(messages) == (said is not None)
    assert all("Hides.__call__ gave every sample of a batch the reward 0" in m and said in m for m in messages)


def test_equal_scores_alone_are_no_warning(tokenizer, tmp_path, caplog):  # noqa: F811
    (tmp_path / "managers.py").write_text(HIDES.format(read=CALL))
    manager = load_reward_manager(tokenizer, manager="Hides", manager_path=str(tmp_path / "managers.py"))
    with caplog.at_level(logging.WARNING):
        assert manager(make_batch(["a", "b"], ["D", "D"], sources=["cais/mmlu"] * 2)).sum() == 0
    assert not caplog.records


def test_a_manager_that_needs_no_rule_scores_any_data_source(tokenizer):  # noqa: F811
    import_module(EXAMPLE)
    scored = load_reward_manager(tokenizer, manager="brief", manager_kwargs={"limit": 2}, config=CONFIG)
    assert scored.compute_score.for_data_source("gsm8k") is not scored.compute_score
    assert scored.compute_score.for_data_source("my/own") is scored.compute_score  # no error before it is called


OWN_CALL = """
import torch

from verl.workers.reward_manager import register
from verl.workers.reward_manager.prime import PrimeRewardManager


class Own(PrimeRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", bonus=0.5, **kwargs):
        super().__init__(tokenizer, num_examine, compute_score=compute_score, reward_fn_key=reward_fn_key)
        self.bonus = bonus

    def verify(self, data):
        scores = [float(score) + self.bonus for score in super().verify(data)]
        data.batch["acc"] = torch.tensor(scores)
        return scores

    def __call__(self, data, return_dict: bool = False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(dim=-1)
        for i, score in enumerate(self.verify(data)):
            rewards[i, lengths[i].item() - 1] = score
        return {"reward_tensor": rewards} if return_dict else rewards
"""


def test_a_subclass_of_a_public_manager_has_its_own_call(tokenizer, tmp_path):  # noqa: F811
    """It returns what managers of public verl return, and may add columns to its batch."""
    (tmp_path / "own.py").write_text(OWN_CALL)
    settings = {"bonus": 0.25, "timeout": None, "isolation": "none"}
    manager = load_reward_manager(
        tokenizer, manager="Own", manager_path=str(tmp_path / "own.py"), manager_kwargs=settings
    )
    result = manager(PUBLIC_BATCH, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.25, 0.25, 1.25] and "acc" not in PUBLIC_BATCH
    assert result["metrics"]["reward/failed_rows"] == 0.0
