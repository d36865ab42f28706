"""Invalid reward settings and invalid ground truths: each is refused with one message."""

from pathlib import Path

import pytest

from verl.rewards import (
    REWARD_FUNCTION_REGISTRY,
    REWARD_MANAGER_REGISTRY,
    load_reward_manager,
    register_data_source,
    register_reward_manager,
    resolve_reward_function,
)
from verl.rewards.rules import gsm8k

SAMPLES = str(Path(__file__).with_name("sample_rewards.py"))


def resolve(**arguments):
    return lambda: resolve_reward_function(**arguments)


def weighted(*rewards):
    return resolve(registered="weighted", reward_kwargs={"rewards": list(rewards)})


def manager(name="naive", function="compute_score", **kwargs):
    return lambda: load_reward_manager(
        None, manager=name, function_path=SAMPLES, function_name=function, manager_kwargs=kwargs
    )


def overlong(max_resp_len=None, **buffer):
    return manager("dapo", max_resp_len=max_resp_len, overlong_buffer=buffer)


def scored(name, *truths):
    """The function `name` on every one of these ground truths."""
    return [lambda truth=truth: resolve_reward_function(registered=name)(**sample(truth)) for truth in truths]


def sample(truth):
    return {"data_source": "any", "solution_str": "#### 7", "ground_truth": truth}


REFUSED = {
    "no file": resolve(path="no/such/file.py"),
    "did you mean 'compute_score'": resolve(path=SAMPLES, name="compute_scor"),
    "must be callable": resolve(path=SAMPLES, name="os"),
    "no value for rewards: add a default": resolve(registered="weighted"),
    "no parameter 'wieght'": resolve(path=SAMPLES, reward_kwargs={"wieght": 1}),
    "must not contain ground_truth": resolve(path=SAMPLES, reward_kwargs={"ground_truth": 1}),
    "did you mean 'accuracy_reward'": resolve(registered="acuracy_reward"),
    "give one of them$": resolve(registered="gsm8k", path=SAMPLES),
    "without reward.custom_reward_function.path": resolve(name="my_score"),
    "without a reward function": resolve(reward_kwargs={"weight": 1}),
    # weighted sums
    "at least one": weighted(),
    "did you mean 'format'": weighted({"name": "formt"}),
    "did you mean 'weight'": weighted({"name": "format", "wieght": 1}),
    "two rewards are labeled 'format'": weighted({"name": "format"}, {"name": "format"}),
    "plain function, but another reward is async": weighted(
        {"path": SAMPLES, "name": "slow_judge"}, {"path": SAMPLES, "name": "compute_score"}
    ),
    "weighted: batch.* takes lists": weighted({"path": SAMPLES, "name": "batch"}),
    # managers
    "did you mean 'naive'": manager("naif"),
    "did you mean 'timeout'": manager(time_out=3),
    "timeout: expected seconds above 0": manager(timeout=0),
    "failure_score: expected a finite number": manager(failure_score=float("nan")),
    "expected 'raise' or 'count'": manager(on_error="ignore"),
    "takes lists, .* use reward_manager=batch": manager("naive", "batch"),
    "takes one response, .* use reward_manager=naive": manager("batch"),
    "'compute_score': expected a subclass of RewardManager": lambda: load_reward_manager(
        None, manager="compute_score", manager_path=SAMPLES
    ),
    "'mine': expected a subclass of RewardManager": lambda: register_reward_manager("mine")(int),
    "cannot be called in another process": lambda: REWARD_MANAGER_REGISTRY["prime"](
        None, lambda solution_str, ground_truth, **_: 1.0
    ),
    "len=4, max_resp_len=None": overlong(enable=True, len=4),
    "0 < len <= max_resp_len, found len=0": overlong(6, enable=True, len=0),
    "found len=7, max_resp_len=6": overlong(6, enable=True, len=7),
    "did you mean 'enable'": overlong(enabled=True),
    # data sources and rules
    "expected the name of a data source": lambda: register_data_source("", REWARD_FUNCTION_REGISTRY["gsm8k"]),
    "'strict' or 'flexible'": lambda: gsm8k.extract("#### 7", "lax"),
    "gsm8k: ground truth: expected a n": scored("gsm8k", None, "", "seven", "7 apples"),
    "math: ground truth: expected a non-empty text": scored("math", None, "", "  ", [], {}, {"other": 1}),
    "accuracy_reward: ground truth: expected a non-empty text": scored("accuracy_reward", None, "", " "),
    "reference answer is empty": scored("accuracy_reward", "The answer is"),
    "ground truth: expected one of A to J": scored("multiple_choice", "BC", 11, True, "?"),
    "code: ground truth: expected {inputs, outputs} of equal length": scored(
        "code", None, {}, {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, [], 3
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    calls = REFUSED[message]
    for call in calls if isinstance(calls, list) else [calls]:
        with pytest.raises(ValueError, match=message):
            call()
