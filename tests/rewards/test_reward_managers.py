"""Reward managers: position of the reward, failing functions, and independence of the samples."""

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.protocol import DataProto
from verl.registry import load_object
from verl.rewards import REWARD_MANAGER_REGISTRY, RewardError, RewardManager, load_reward_manager
from verl.rewards.managers import NaiveRewardManager

SAMPLES = str(Path(__file__).with_name("sample_rewards.py"))
LETTERS = {letter: i for i, letter in enumerate("?$.abcdef0123456789 #")}  # ? unknown, $ padding, . end
PAD, EOS = LETTERS["$"], LETTERS["."]
WIDTH = 6


@pytest.fixture(scope="module")
def tokenizer():
    model = Tokenizer(models.WordLevel(LETTERS, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?", pad_token="$", eos_token=".")


def make_batch(texts, truths=None, extra_infos=None, sources=None, chosen=None):
    """Responses with one letter per token, "." is EOS: prompts "ab" left-padded to 3, responses right-padded to 6."""
    count = len(texts)
    responses = torch.full((count, WIDTH), PAD)
    mask = torch.zeros(count, WIDTH, dtype=torch.int64)
    for i, text in enumerate(texts):
        responses[i, : len(text)] = torch.tensor([LETTERS[c] for c in text], dtype=torch.int64)
        mask[i, : len(text)] = 1
    prompts = torch.tensor([[PAD, LETTERS["a"], LETTERS["b"]]]).repeat(count, 1)
    attention = torch.cat([torch.tensor([[0, 1, 1]]).repeat(count, 1), mask], 1)
    tensors = {"prompts": prompts, "responses": responses, "attention_mask": attention}
    tensors["response_mask"] = mask if chosen is None else torch.tensor(chosen)
    truths = [text.rstrip(".") for text in texts] if truths is None else truths
    return DataProto.from_dict(
        tensors,
        {
            "data_source": sources or ["test"] * count,
            "reward_model": [{"style": "rule", "ground_truth": t} for t in truths],
            "extra_info": extra_infos or [{"index": 100 + i} for i in range(count)],
            "uid": [f"u{i}" for i in range(count)],
        },
    )


def manager_for(tokenizer, name, manager="naive", **kwargs):
    return load_reward_manager(
        tokenizer, manager=manager, function_path=SAMPLES, function_name=name, manager_kwargs=kwargs
    )


@pytest.mark.parametrize(
    ("texts", "chosen", "positions"),
    [
        (["abc.", "cd", "abcdef"], None, [[0, 3], [1, 1], [2, 5]]),
        (["", "ab"], None, [[0, 0], [1, 1]]),
        # the first sample ends with two tool tokens, the second has one in the middle
        (["abcd", "abc"], [[1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]], [[0, 1], [1, 2]]),
        (["abc."], "no response_mask", [[0, 3]]),
    ],
)
def test_the_score_is_at_the_last_token_of_the_policy(tokenizer, texts, chosen, positions):
    no_mask = isinstance(chosen, str)
    batch = make_batch(texts, chosen=None if no_mask else chosen).drop(["response_mask"] if no_mask else [])
    result = manager_for(tokenizer, "compute_score")(batch, return_dict=True)
    expected = torch.zeros(len(texts), WIDTH)
    expected[tuple(torch.tensor(positions).T)] = 1.0
    assert result["reward_tensor"].dtype == torch.float32 and torch.equal(result["reward_tensor"], expected)
    assert result["metrics"] == {"reward/failed_rows": 0.0, "reward/empty_responses": float("" in texts)}


def test_extra_values_are_kept_per_sample(tokenizer):
    batch = make_batch(["abc.", "cd"], truths=["abc", "x"])
    result = manager_for(tokenizer, "with_extras")(batch, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, -1.0]
    assert result["reward_extra_info"] == {"acc": [True, False], "length": [3, 2]}


def test_functions_receive_the_length_in_tokens(tokenizer):
    batch = make_batch(["abc.", ""], extra_infos=[{"index": 1}, None])
    scored = NaiveRewardManager(tokenizer, lambda solution_str, response_length: response_length)
    assert scored(batch).sum(1).tolist() == [4.0, 0.0]


def test_samples_of_several_sources_may_have_different_extra_values(tokenizer):
    batch = make_batch(["#### 7", "abc"], extra_infos=[{"gives": 1}, {"gives": {"score": 0, "kind": "x"}}])
    result = manager_for(tokenizer, "gives")(batch, return_dict=True)
    assert result["reward_extra_info"] == {"acc": [1.0, 0.0], "kind": [None, "x"]}


@pytest.mark.parametrize("manager, function", [("naive", "with_extras"), ("prime", "with_extras"), ("batch", "batch")])
def test_rewards_follow_their_samples_in_any_order(tokenizer, manager, function):
    texts = ["abc.", "cd", "", "abcdef", "a", "bb"]
    batch = make_batch(texts, truths=["abc", "x", "", "abcdef", "b", "bb"])
    scored = manager_for(tokenizer, function, manager)
    whole = scored(batch, return_dict=True)
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 3, 4]):
        shuffled = scored(batch[np.array(order)], return_dict=True)
        assert torch.equal(shuffled["reward_tensor"], whole["reward_tensor"][order])
        for name, values in whole["reward_extra_info"].items():
            assert shuffled["reward_extra_info"][name] == [values[i] for i in order]


# ---- failing functions ----------------------------------------------------------------------------------------------

NOT_SCORES = [(None, "returned None"), (float("nan"), "returned nan"), (float("inf"), "returned inf")]
NOT_SCORES += [(10**400, "returned inf"), ("1.0", "returned str '1.0'"), ([1.0], "returned list")]
NOT_SCORES += [(1j, "returned complex"), (np.array([1.0]), r"returned an array of shape \(1,\)")]
NOT_SCORES += [(torch.zeros(2, 3), r"returned an array of shape \(2, 3\)")]
NOT_SCORES += [({"acc": 1}, "a dict without \"score\": it has 'acc'")]
NOT_SCORES += [({"score": None}, 'a dict whose "score" is None')]
SCORES = [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1.0), {"score": True}]


@pytest.mark.parametrize("value", SCORES, ids=repr)
def test_every_kind_of_number_is_a_score(tokenizer, value):
    assert manager_for(tokenizer, "gives")(make_batch(["ab"], extra_infos=[{"gives": value}])).sum() == 1.0


@pytest.mark.parametrize("value, phrase", NOT_SCORES, ids=lambda v: repr(v)[:20])
def test_anything_else_is_an_error_that_names_function_and_sample(tokenizer, value, phrase):
    batch = make_batch(["abc", "de"], extra_infos=[{"gives": 1}, {"gives": value, "index": 17}])
    with pytest.raises(RewardError, match=phrase) as error:
        manager_for(tokenizer, "gives")(batch)
    text = str(error.value)
    for part in (
        f"gives() at {SAMPLES}:",
        "sample 1 of 2",
        "'test'",
        "'u1'",
        "index 17",
        "response: 'de'",
        "truth: 'de'",
    ):
        assert part in text
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_an_exception_is_chained_to_its_traceback(tokenizer, manager):
    with pytest.raises(RewardError, match="raised KeyError: 'no such thing as b'") as error:
        manager_for(tokenizer, "raises_on_b", manager)(make_batch(["a", "ab"]))
    cause = error.value.__cause__
    assert isinstance(cause, KeyError) if manager == "naive" else "in raises_on_b" in str(cause)


@pytest.mark.parametrize(
    ("manager", "function"), [("naive", "exits_on_b"), ("naive", "exits_on_b_async"), ("prime", "exits_on_b")]
)
def test_an_exit_is_an_error_of_the_function_and_not_the_end_of_the_run(tokenizer, manager, function):
    with pytest.raises(RewardError, match=rf"{function}\(\) at .* raised SystemExit: 3"):
        manager_for(tokenizer, function, manager)(make_batch(["a", "ab"]))


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_counted_samples_get_the_failure_score(tokenizer, manager, caplog):
    scored = manager_for(tokenizer, "raises_on_b", manager, on_error="count", failure_score=-0.5)
    result = scored(make_batch(["a", "ab", "cb", "d"]), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, -0.5, -0.5, 1.0]
    assert result["reward_extra_info"]["acc"] == [1.0, 0.0, 0.0, 1.0]
    assert result["metrics"]["reward/failed_rows"] == 2.0
    assert caplog.text.count("no such thing as b") >= 1 and "in raises_on_b" in caplog.text
    assert "2 of 4 samples failed to score" in caplog.text
    assert "failure_score" not in caplog.text


def test_a_failure_score_above_the_score_of_a_wrong_response_is_logged(tokenizer, caplog):
    scored = manager_for(tokenizer, "fails_or_minus_one", on_error="count")
    assert scored(make_batch(["a", "b"])).sum(1).tolist() == [-1.0, 0.0]
    assert "reward.failure_score=0 is above the lowest score of this batch" in caplog.text
    assert "set reward.failure_score=-1" in caplog.text


def test_too_many_failures_stop_with_the_most_frequent_errors(tokenizer):
    """1 failing sample is always tolerated; of 10, 2 are more than 10 %."""
    limits = {"on_error": "count", "max_failure_rate": 0.1}
    scored = manager_for(tokenizer, "raises_on_b", **limits)
    assert scored(make_batch(["a", "b"])).sum(1).tolist() == [1.0, 0.0]
    expected = (
        r"2 of 10 samples of a step failed to score, more than reward.max_failure_rate=0.1:\n  2 x reward function "
        r"raises_on_b\(\) .*no such thing as b"
    )
    with pytest.raises(RewardError, match=expected):
        scored(make_batch(["a"] * 8 + ["b"] * 2))
    assert scored(make_batch(["a"] * 18 + ["b"] * 2)).sum().item() == 18


class Flaky:
    """Fails at its first `failing` calls with "b"."""

    def __init__(self, failing):
        self.failing, self.calls = failing, []

    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        self.calls.append(solution_str)
        if "b" in solution_str and self.calls.count(solution_str) <= self.failing:
            raise ConnectionError("service is down")
        return 1.0


def test_failed_samples_are_scored_again(tokenizer, monkeypatch, caplog):
    waits = []
    monkeypatch.setattr("verl.rewards.managers.time.sleep", waits.append)
    function = Flaky(failing=2)
    scored = NaiveRewardManager(tokenizer, function, retries=2)
    assert scored(make_batch(["a", "b", "c"])).sum(1).tolist() == [1.0, 1.0, 1.0]
    assert function.calls == ["a", "b", "c", "b", "b"] and waits == [1.0, 2.0]
    assert "1 of 3 samples failed to score; retry 1 of 2; the first: reward function" in caplog.text
    with pytest.raises(RewardError, match="ConnectionError: service is down"):
        NaiveRewardManager(tokenizer, Flaky(failing=3), retries=2)(make_batch(["b"]))


@pytest.mark.parametrize(
    "manager, function", [("naive", "hangs_on_b"), ("prime", "hangs_on_b"), ("prime", "swallows_everything")]
)
def test_a_hanging_call_is_named(tokenizer, manager, function):
    begun = time.monotonic()
    with pytest.raises(RewardError, match=rf"{function}\(\) at .* did not end within 0\.3 s(.|\n)*sample 1 of 3"):
        manager_for(tokenizer, function, manager, timeout=0.3)(make_batch(["a", "ab", "c"]))
    assert time.monotonic() - begun < 10


def test_library_code_and_a_function_that_swallows_the_alarm_are_interrupted(tokenizer):
    reward = manager_for(tokenizer, "swallows_everything", timeout=0.2)(make_batch(["ab"]))
    assert reward.sum() == 0.5
    with pytest.raises(RewardError, match=r"did not end within 0\.3 s"):
        manager_for(tokenizer, "backtracks", timeout=0.3)(make_batch(["a"]))


@pytest.mark.parametrize("where", ["main thread", "thread", "event loop"])
def test_scoring_continues_after_a_hanging_call(tokenizer, where):
    scored = manager_for(tokenizer, "hangs_on_b", timeout=0.3, on_error="count")
    batch = make_batch(["a", "ab", "c", "b"])
    found = []
    if where == "thread":
        thread = threading.Thread(target=lambda: found.append(scored(batch)))
        thread.start()
        thread.join()
    elif where == "event loop":
        asyncio.run(asyncio.to_thread(lambda: found.append(scored(batch))))
    else:
        found.append(scored(batch))
    assert found[0].sum(1).tolist() == [1.0, 0.0, 1.0, 0.0]


def test_a_function_without_address_has_no_deadline_outside_the_main_thread(tokenizer):
    scored = REWARD_MANAGER_REGISTRY["naive"](tokenizer, lambda solution_str, ground_truth, **_: 1.0)
    found = []

    def run():
        try:
            scored(make_batch(["a"]))
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "outside of the main thread" in found[0] and "timeout=null" in found[0]
    assert scored(make_batch(["a"])).sum() == 1.0


# ---- async functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_async_calls_run_concurrently(tokenizer, inside_a_loop):
    scored, batch = manager_for(tokenizer, "slow_judge"), make_batch(["a"] * 100)

    async def call():
        return scored(batch)

    begun = time.monotonic()
    reward = asyncio.run(call()) if inside_a_loop else scored(batch)
    assert reward.sum() == 100.0 and time.monotonic() - begun < 20 * 0.9  # one after another: 20 s


def test_async_calls_time_out_even_if_one_blocks_the_loop(tokenizer, monkeypatch):
    monkeypatch.setattr("verl.rewards.sandbox.calls._GRACE_SECONDS", 0.5)
    scored = manager_for(tokenizer, "bad_judge", timeout=0.3, on_error="count", max_concurrency=2)
    result = scored(make_batch(["a", "b", "c", "d", "e", "f"]), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert result["metrics"]["reward/failed_rows"] == 2.0


# ---- batch, dapo, prime ---------------------------------------------------------------------------------------------


def test_batch_calls_once_with_lists(tokenizer):
    result = manager_for(tokenizer, "batch", "batch")(make_batch(["ab", "abcd"], ["ab", "x"]), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.0]
    assert result["reward_extra_info"]["share"] == [0.5, 1.0]


@pytest.mark.parametrize(("name", "returned"), [("batch_too_short", "1 entries"), ("batch_number", "float 1.0")])
def test_batch_expects_one_entry_per_sample(tokenizer, name, returned):
    with pytest.raises(RewardError, match=f"returned {returned}: expected a list with one entry for each of 2 samples"):
        manager_for(tokenizer, name, "batch")(make_batch(["ab", "abcd"]))


def test_dapo_penalizes_long_responses(tokenizer):
    """max 6, buffer 4: no penalty up to 2 tokens, then -1/4 * 0.5 per token; lengths 1 2 3 6."""
    buffer = {"enable": True, "len": 4, "penalty_factor": 0.5, "log": True}
    scored = manager_for(tokenizer, "compute_score", "dapo", max_resp_len=6, overlong_buffer=buffer)
    batch = make_batch(["a", "ab", "abc", "abcde."], truths=["a", "ab", "x", "abcde"])
    result = scored(batch, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 1.0, -0.125, 0.5]
    assert result["reward_extra_info"] == {
        "acc": [1.0, 1.0, 0.0, 1.0],
        "overlong_reward": [0.0, 0.0, -0.125, -0.5],
        "overlong": [False, False, True, True],
    }


def test_the_reward_of_dapo_is_minus_one_for_a_wrong_answer(tokenizer):
    """-1 or 1 by data source, as in verl; the overlong penalty is added to it, and "acc" stays 0 or 1."""
    buffer = {"enable": True, "len": 4}
    sources = ["math_dapo", "aime24", "math", "aime25"]
    batch = make_batch(["7", "8", "     7", "     8"], truths=["7"] * 4, sources=sources)
    kwargs = {"max_resp_len": 6, "overlong_buffer": buffer}
    scored = load_reward_manager(tokenizer, manager="dapo", manager_kwargs=kwargs)
    result = scored(batch, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, -1.0, 0.0, -2.0]
    assert result["reward_extra_info"]["acc"] == [1.0, 0.0, 1.0, 0.0]
    assert result["reward_extra_info"]["pred"][:2] == ["7", "8"]


# ---- from configuration ---------------------------------------------------------------------------------------------


def test_rules_are_selected_per_sample(tokenizer):
    batch = make_batch(["#### 7", "7", "#### 7"], truths=["7.0", "7", "8"], sources=["openai/gsm8k", "math", "gsm8k"])
    assert load_reward_manager(tokenizer)(batch).sum(1).tolist() == [1.0, 1.0, 0.0]


def test_an_unknown_data_source_raises_even_if_errors_are_counted(tokenizer):
    with pytest.raises(ValueError, match="no reward rule for data_source 'test'"):
        load_reward_manager(tokenizer, manager_kwargs={"on_error": "count"})(make_batch(["a"]))


def test_missing_columns_and_ground_truths_are_named(tokenizer):
    scored = manager_for(tokenizer, "compute_score")
    with pytest.raises(ValueError, match="no column 'reward_model'"):
        scored(make_batch(["a"]).drop(["reward_model"]))
    with pytest.raises(ValueError, match="row 0: expected a mapping with 'ground_truth'"):
        scored(make_batch(["a"]).replace(reward_model=[{"style": "rule"}]))


def test_a_custom_manager_by_path(tokenizer, tmp_path):
    path = tmp_path / "constant.py"
    path.write_text(
        "import torch\n"
        "from verl.rewards import RewardManager\n"
        "class Constant(RewardManager):\n"
        "    def __init__(self, tokenizer, compute_score, *, value, **kwargs):\n"
        "        super().__init__(tokenizer, compute_score, **kwargs)\n"
        "        self.value = value\n"
        "    def __call__(self, data, return_dict=False):\n"
        "        return torch.full(data.column('responses').shape, self.value)\n"
    )
    kwargs = {"manager": "Constant", "manager_path": str(path), "function_path": SAMPLES}
    scored = load_reward_manager(tokenizer, **kwargs, manager_kwargs={"value": 0.25, "timeout": 3.0})
    assert isinstance(scored, RewardManager) and (scored(make_batch(["a"])) == 0.25).all() and scored.timeout == 3.0
    with pytest.raises(ValueError, match=r"did you mean 'value'.* A custom manager takes"):
        load_reward_manager(tokenizer, **kwargs, manager_kwargs={"valeu": 1})


@pytest.mark.parametrize("name", sorted(REWARD_MANAGER_REGISTRY))
def test_every_registered_manager_keeps_the_contract(tokenizer, name):
    function = load_object(SAMPLES, "batch" if name == "batch" else "compute_score")
    scored = REWARD_MANAGER_REGISTRY[name](tokenizer, function)
    batch = make_batch(["abc.", "cd"], truths=["abc", "x"])
    reward, full = scored(batch), scored(batch, return_dict=True)
    assert reward.shape == (2, WIDTH) and reward.dtype == torch.float32 and reward.sum(1).tolist() == [1.0, 0.0]
    assert torch.equal(full["reward_tensor"], reward) and full["reward_extra_info"]["acc"] == [1.0, 0.0]


def test_some_samples_of_each_source_are_printed(tokenizer, capsys):
    batch = make_batch(["a.", "b", "c"], sources=["one", "one", "two"])
    scored = load_reward_manager(tokenizer, function_path=SAMPLES, num_examine=1)
    scored(batch)
    shown = capsys.readouterr().out
    assert shown.count("[response]") == 2 and "[response] a\n" in shown and "[response] c\n" in shown
    assert "[prompt] ab\n" in shown and "[score] 1\n" in shown and "[data_source] two" in shown
    load_reward_manager(tokenizer, function_path=SAMPLES)(batch)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("manager", ["naive", "batch"])
def test_the_reward_of_an_agent_loop_is_that_of_its_sample(tokenizer, tmp_path, manager):
    """The function scores the other samples, so the data source of a scored sample needs no rule."""
    (tmp_path / "score.py").write_text(
        "def one(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
        "def all(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [len(text) for text in solution_strs]\n"
    )
    name = {"naive": "one", "batch": "all"}[manager]
    made = load_reward_manager(tokenizer, manager=manager, function_path=str(tmp_path / "score.py"), function_name=name)
    scored = {"reward_score": 0.25, "reward_extra_info": {"calls": 2, "texts": ["a"]}}
    batch = make_batch(["a", "bcd", "ab"]).union(DataProto.from_dict(None, {"trajectory_info": [scored, {}, scored]}))
    result = made(batch, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [0.25, 3.0, 0.25]
    assert result["reward_extra_info"]["calls"] == [2, None, 2] and "texts" not in result["reward_extra_info"]
