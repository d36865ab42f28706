"""The trial of a reward function before a run: which rewards it calls faulty, and which not."""

import json

import pytest

from verl.rewards.resolve import rule_for
from verl.rewards.trial import describe_fault, trial_responses


def scores(function, truth, solution=None):
    return {kind: [function(text) for text in texts] for kind, texts in trial_responses(truth, solution).items()}


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (lambda text: 1.0, "pays every response the same (best scores: right 1, wrong 1, empty 1)"),
        (lambda text: 0.0, "pays nothing for a right response (best scores: right 0, wrong 0, empty 0)"),
        (lambda text: float(text == str(["7"])), "pays nothing for a right response"),  # compares with a list's text
        (lambda text: len(text) / 100, "pays a wrong response as much as a right one, or more; its score grows with"),
        (lambda text: 1 - len(text) / 1e4, "pays an empty response as much as a right one, or more; its score falls"),
        (lambda text: float("boxed" in text), "pays a wrong response as much as a right one"),
        (lambda text: float("7" in text and "987" not in text), None),
        (lambda text: 1.0 if text == "7" else -1.0, None),
    ],
)
def test_rewards_that_cannot_be_right_are_described(function, fault):
    found = describe_fault(scores(function, ["7"]))
    assert found is None if fault is None else found.startswith(fault)


@pytest.mark.parametrize(
    ("source", "truth", "solution"),
    [
        ("openai/gsm8k", "7 + 65 = 72\n#### 72", None),
        ("math_dapo", "34", None),
        ("lighteval/MATH", r"\frac{1}{2}", None),
        ("aime24", 33, None),
        ("cais/mmlu", 2, None),
        ("cais/mmlu", "B", None),
        ("hiyouga/geometry3k", "5", None),
        ("searchR1_nq", {"target": ["Ada"]}, None),
        ("taco", json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}), None),
        ("taco", json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}), "print(int(input()) + 1)"),
        ("mbpp", "assert f(1) == 2", None),
    ],
)
def test_every_rule_passes_its_trial(source, truth, solution):
    def score(text):
        result = rule_for(source)(data_source=source, solution_str=text, ground_truth=truth, extra_info={})
        return result["score"] if isinstance(result, dict) else result

    found = scores(score, truth, solution)
    assert describe_fault(found) is None
    if found["right"]:
        assert max(found["right"]) > max(found["wrong"] + found["empty"])


@pytest.mark.parametrize("measure", [len, lambda text: len(text.split()), lambda text: min(len(text) / 50, 1.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_reward_by_length_is_named_also_where_the_right_response_is_long(measure, sign):
    """A worked solution is paid more than any wrong response; the short right one less than a long wrong one."""
    solution = "First we add seven to sixty-five. " * 30 + "#### 72"
    fault = describe_fault(scores(lambda text: sign * measure(text), "72", solution))
    assert f"its score {'grows' if sign > 0 else 'falls'} with the length of the response" in fault
    right = describe_fault(scores(lambda text: float("72" in text) + 1e-4 * sign * measure(text), "72", solution))
    assert right is None, "a small term beside a right reward"


def test_the_tests_of_a_program_are_no_response():
    assert trial_responses("assert f(1) == 2")["right"] == []
    assert trial_responses(None)["right"] == []
    assert trial_responses('{"inputs": ["1"], "outputs": ["2"]}')["right"] == []


@pytest.mark.parametrize("truth", ['{"name": "Ada", "age": 36}', {"name": "Ada", "age": 36}])
def test_an_object_is_tried_as_a_response_and_its_score_is_no_evidence(truth):
    assert trial_responses(truth)["truth"] == ['{"name": "Ada", "age": 36}']
    assert describe_fault(scores(lambda text: float(text[:1] == "{"), truth)) is None
    assert describe_fault(scores(lambda text: 0.0, truth)) is None
    assert trial_responses("42")["truth"] == []
