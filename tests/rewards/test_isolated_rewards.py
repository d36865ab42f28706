"""Custom reward functions in a worker process: what ends or blocks a process does not end or block the trainer."""

import asyncio
import os
import time

import pytest
import torch

from tests.rewards.test_reward_managers import make_batch, tokenizer  # noqa: F401 (a fixture)
from verl.registry import import_module
from verl.rewards import RewardError, as_reward_manager, load_reward_manager, resolve_reward_function
from verl.rewards.functions import ScoreFunction
from verl.rewards.resolve import RULES_BY_DATA_SOURCE
from verl.rewards.sandbox.calls import Isolation

REWARDS = '''
import ctypes
import os

import numpy as np

from verl import RewardFunction

calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Does what the response says."""
    global calls
    calls += 1
    if solution_str == "a":
        os._exit(3)
    if solution_str == "b":
        ctypes.string_at(0)  # a segmentation fault
    if solution_str == "c":
        ctypes.PyDLL(None).sleep(60)  # C code that keeps the interpreter
    if solution_str == "d":
        breakpoint()
    if solution_str == "e":
        hoard = np.ones(1 << 26)
        ctypes.PyDLL(None).sleep(60)
    if solution_str == "ee" and os.fork() == 0:
        hoard = np.ones(1 << 25)
        ctypes.PyDLL(None).sleep(60)
    if solution_str == "ee":
        os.wait()
    if solution_str == "f":
        os.chdir("/")
        print("moved to", os.getcwd())
        return {"score": np.float32(1.0), "pid": os.getpid(), "calls": calls}
    return {"score": 0.5, "pid": os.getpid(), "calls": calls}


class Counting(RewardFunction):
    def __init__(self, step=1.0):
        self.step, self.total = step, 0.0

    def __call__(self, sampled_response, reference_answer):
        self.total += self.step
        return {"score": self.total, "pid": os.getpid()}


async def judge(data_source, solution_str, ground_truth):
    if solution_str == "a":
        os._exit(3)
    if solution_str == "b":
        raise KeyError("b")
    return {"score": 1.0, "pid": os.getpid(), "extra": (lambda: 1) if solution_str == "c" else 1}


def of_source(data_source, solution_str, ground_truth):
    return os.getpid()


def lists(data_sources, solution_strs, ground_truths):
    return [{"score": float(len(text)), "pid": os.getpid()} for text in solution_strs]


def reward_fn(batch):
    scores = batch.batch["response_mask"].float()
    return {"reward_tensor": scores, "reward_extra_info": {"pid": [os.getpid()] * len(batch)}}
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "reward.py"
    file.write_text(REWARDS)
    return str(file)


def load(tokenizer, path, name="compute_score", kwargs=None, manager="naive", **settings):  # noqa: F811
    settings = {"isolation": "process", "timeout": 20.0} | settings
    function = {"function_path": path, "function_name": name, "reward_kwargs": kwargs}
    return load_reward_manager(tokenizer, **function, manager=manager, manager_kwargs=settings)


def test_what_ends_or_blocks_its_process_fails_its_sample_only(tokenizer, path, caplog):  # noqa: F811
    scored = load(tokenizer, path, timeout=1.5, on_error="count", failure_score=-1.0)
    begun = time.monotonic()
    result = scored(make_batch(["f", "a", "0", "b", "c", "1"]), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, -1.0, 0.5, -1.0, -1.0, 0.5]
    assert time.monotonic() - begun < 30
    assert "ended its process, which exited with status 3" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b", r"compute_score\(\) at .*reward.py:\d+ ended its process, which was killed by SIGSEGV"),
        ("d", r"raised RuntimeError: breakpoint\(\) needs a terminal.*: set reward.isolation=none"),
        ("e", r"used more than 256 MiB of memory and was stopped"),
        ("ee", r"used more than 256 MiB of memory and was stopped"),  # by a child process
    ],
)
def test_the_error_says_what_happened(tokenizer, path, text, message):  # noqa: F811
    with pytest.raises(RewardError, match=message):
        load(tokenizer, path, memory_limit_mb=256)(make_batch([text]))


def test_one_process_keeps_the_state_of_the_function(tokenizer, path, capsys):  # noqa: F811
    scored, folder = load(tokenizer, path), os.getcwd()
    first, second = (scored(make_batch(["f", "0"]), return_dict=True)["reward_extra_info"] for _ in range(2))
    assert first["calls"] + second["calls"] == [1, 2, 3, 4]
    assert len({*first["pid"], *second["pid"]}) == 1 and os.getpid() not in first["pid"]
    assert capsys.readouterr().out == "moved to /\n" * 2 and os.getcwd() == folder


def test_all_forms_are_isolated(tokenizer, path):  # noqa: F811
    batch = make_batch(["0", "11"])
    for name, manager, scores in (
        ("Counting", "naive", [2.0, 4.0]),
        ("judge", "naive", [1.0, 1.0]),
        ("lists", "batch", [1.0, 2.0]),
    ):
        kwargs = {"step": 2.0} if name == "Counting" else None
        result = load(tokenizer, path, name, kwargs, manager)(batch, return_dict=True)
        assert result["reward_tensor"].sum(1).tolist() == scores
        assert os.getpid() not in result["reward_extra_info"]["pid"]


@pytest.mark.slow  # the process imports torch
def test_a_function_of_the_batch_is_isolated(tokenizer, path):  # noqa: F811
    result = load(tokenizer, path, "reward_fn", timeout=None)(make_batch(["0", "11"]), return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 2.0]
    assert os.getpid() not in result["reward_extra_info"]["pid"]


def test_async_functions(tokenizer, path):  # noqa: F811
    scored = load(tokenizer, path, "judge", on_error="count")
    assert scored(make_batch(["0", "b", "1", "c"])).sum(1).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert asyncio.run(asyncio.to_thread(scored, make_batch(["0", "b"]))).sum() == 1.0
    with pytest.raises(RewardError, match="ended its process, which exited with status 3"):
        load(tokenizer, path, "judge")(make_batch(["0", "a"]))


def test_the_function_of_a_public_manager(tokenizer, path):  # noqa: F811
    manager = {"manager_path": "examples/reward_fn/public_reward_manager.py", "manager": "BriefRewardManager"}
    settings = {"isolation": "process", "timeout": 20.0}
    scored = load_reward_manager(tokenizer, **manager, function_path=path, manager_kwargs=settings)
    assert scored(make_batch(["0"])).sum() == 0.5
    with pytest.raises(RewardError, match="ended its process, which exited with status 3"):
        scored(make_batch(["a"]))


def test_a_function_that_cannot_be_sent_is_called_here_and_logged(tokenizer, caplog):  # noqa: F811
    caplog.set_level("INFO", "verl.rewards")
    pids = []

    def inner(sampled_response, reference_answer):
        pids.append(os.getpid())
        return torch.tensor(1.0)

    assert as_reward_manager(inner, tokenizer, isolation="process")(make_batch(["0", "1"])).sum() == 2.0
    assert pids == [os.getpid()] * 2
    (line,) = caplog.messages
    assert "inner() at " in line and "is called in the trainer's process: " in line and "top-level function" in line


def test_the_rule_of_a_data_source_is_called_in_the_worker(tokenizer, path, monkeypatch):  # noqa: F811
    """On its own, in a weighted sum of built-in functions, and by a manager of public verl."""
    monkeypatch.setitem(RULES_BY_DATA_SOURCE, "own/rule", ScoreFunction(import_module(path).of_source))
    terms = {"registered_function": "weighted", "reward_kwargs": {"rewards": [{"name": "data_source"}]}}
    manager = {"manager_path": "examples/reward_fn/public_reward_manager.py", "manager": "BriefRewardManager"}
    for chosen in ({}, terms, manager):
        scored = load_reward_manager(tokenizer, **chosen, manager_kwargs={"isolation": "process", "timeout": 20.0})
        (pid,) = scored(make_batch(["1"], sources=["own/rule"])).sum(1).tolist()
        assert pid not in (0, os.getpid())


def test_builtin_functions_and_other_modes(tokenizer):  # noqa: F811
    scored = load_reward_manager(tokenizer, registered_function="gsm8k", manager_kwargs={"isolation": "process"})
    assert scored.isolation.pool_for(scored.compute_score) is None
    with pytest.raises(ValueError, match="isolation: expected 'process' or 'none', found 'thread'"):
        Isolation("thread", None)


def test_a_weighted_sum_with_a_custom_term_is_called_in_the_worker(tokenizer, tmp_path):  # noqa: F811
    file = tmp_path / "terms.py"
    file.write_text(
        "import os\n\nfrom verl import RewardFunction\nfrom verl.rewards import register_reward\n\n\n"
        "def by_path(data_source, solution_str, ground_truth):\n    return os.getpid()\n\n\n"
        "@register_reward('by_name')\n"
        "def named(sampled_response, reference_answer):\n    return os.getpid()\n\n\n"
        "@register_reward('by_class')\nclass Named(RewardFunction):\n"
        "    def __call__(self, sampled_response, reference_answer):\n        return os.getpid()\n"
    )
    import_module(str(file))
    terms = [{"name": "by_path", "path": str(file)}, {"name": "by_name"}, {"name": "by_class"}, {"name": "format"}]
    function = {"registered_function": "weighted", "reward_kwargs": {"rewards": terms}}
    scored = load_reward_manager(tokenizer, **function, manager_kwargs={"isolation": "process", "timeout": 20.0})
    values = scored(make_batch(["1"]), return_dict=True)["reward_extra_info"]
    assert values["by_path"] == values["by_name"] == values["by_class"] != [os.getpid()]
    builtin = resolve_reward_function(registered="weighted", reward_kwargs={"rewards": [{"name": "format"}]})
    assert Isolation("process", None).pool_for(builtin) is None
