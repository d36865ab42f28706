"""Reward functions: recognized by their parameters, resolved by path, name or data source."""

import doctest
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl import RewardFunction
from verl.registry import import_module
from verl.rewards import (
    REWARD_FUNCTION_REGISTRY,
    RULES_BY_DATA_SOURCE,
    ScoreFunction,
    default_compute_score,
    register_data_source,
    register_reward,
    resolve_reward_function,
)
from verl.rewards.functions import check_registered
from verl.rewards.outcome import read_outcome
from verl.rewards.resolve import rule_for
from verl.rewards.rules import accuracy
from verl.rewards.rules.accuracy import accuracy_reward
from verl.rewards.sandbox.pool import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
SAMPLES = str(Path(__file__).with_name("sample_rewards.py"))


def score(function, solution="7", truth="7", source="gsm8k", extra=None):
    return function(data_source=source, solution_str=solution, ground_truth=truth, extra_info=extra)


def test_both_forms_are_called_alike():
    sample = resolve_reward_function(SAMPLES, "compute_score")
    plugin = resolve_reward_function(SAMPLES, "plugin")
    assert (sample.form, plugin.form) == ("sample", "sample")
    assert score(sample) == score(plugin) == 1
    assert score(sample, "8") == score(plugin, "8") == 0


def test_the_name_is_optional_and_parameters_come_in_any_order():
    assert resolve_reward_function(SAMPLES).name == "compute_score"
    f = ScoreFunction(lambda ground_truth, solution_str, *, data_source, extra_info: (data_source, extra_info))
    assert score(f, extra={"k": 1}) == ("gsm8k", {"k": 1})


def test_kwargs_set_other_parameters():
    assert score(resolve_reward_function(SAMPLES, "weighted", reward_kwargs={"weight": 3.0})) == 3.0
    names = score(ScoreFunction(lambda solution_str, ground_truth, **kwargs: sorted(kwargs)))
    assert names == ["data_source", "extra_info"]


class Judge:
    def __init__(self, bonus):
        self.bonus = bonus

    def __call__(self, data_source, solution_str, ground_truth):
        return self.bonus

    def method(self, sampled_response, reference_answer):
        return self.bonus


def test_objects_methods_and_partials_are_functions_too():
    assert score(ScoreFunction(Judge(2))) == 2
    assert score(ScoreFunction(Judge(3).method)) == 3
    weighted = resolve_reward_function(SAMPLES, "weighted", reward_kwargs={"weight": 1}).func
    assert score(ScoreFunction(functools.partial(weighted, weight=4))) == 4
    assert "Judge() at" in ScoreFunction(Judge(2)).location or "Judge.__call__() at" in ScoreFunction(Judge(2)).location


@pytest.mark.parametrize(
    "func",
    [
        lambda solution, truth: 1,
        lambda: 1,
        lambda **kwargs: 1,
        lambda ground_truth, extra_info: 1,
        lambda solution_str, solution_strs: 1,
        lambda data_source, solution_str, ground_truth, /: 1,
    ],
)
def test_an_unsupported_signature_is_refused(func):
    with pytest.raises(ValueError) as error:
        ScoreFunction(func)
    message = str(error.value)
    assert "compute_score(solution_str, ground_truth)" in message
    assert "found:" in message and "test_reward_functions.py" in message


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (lambda response: response, "7 "),
        (lambda completion, ground_truth: (completion, ground_truth), ("7 ", "7")),
        (lambda solution_str, ground_truth, extra_info: (solution_str, extra_info["level"]), ("7 ", 3)),
        (lambda prompt, response, level: (prompt, response, level), ("3+4=", "7 ", 3)),
        (lambda solution_str, response: (solution_str, response), ("7 ", "seven")),  # the second is a column
        (lambda response, level=1, missing=2: (level, missing), (3, 2)),
        (lambda sampled_response, reference_answer, data: (reference_answer, data), ("7", "d")),
        (lambda response_length, response: response_length, 1),
    ],
)
def test_a_function_gets_the_values_that_it_names(func, expected):
    info = {"level": 3, "response": "seven", "data": "d", "response_length": 1}
    values = {"data_source": "s", "solution_str": "7 ", "ground_truth": "7", "extra_info": info, "prompt": "3+4="}
    assert ScoreFunction(func)(**values) == expected


def test_lists_have_columns_too():
    function = ScoreFunction(lambda solution_strs, level, other=0: (solution_strs, level, other))
    infos = [{"level": 1}, {"level": 2}]
    result = function(data_source=["s"] * 2, solution_str=["a", "b"], ground_truth=[1, 2], extra_info=infos)
    assert (function.form, result) == ("batch", (["a", "b"], [1, 2], 0))


def test_a_parameter_that_is_no_column_is_named_with_the_columns():
    function = ScoreFunction(lambda solution_str, difficulty: 1)
    with pytest.raises(ValueError, match=r"no value for difficulty: it is no column of the data .*: kind, level"):
        score(function, extra={"level": 3, "kind": "k"})
    assert score(ScoreFunction(lambda solution_str, difficulty: difficulty, {"difficulty": 2})) == 2


def test_columns_do_not_set_the_parameters_of_built_in_functions():
    function = resolve_reward_function(registered="gsm8k", reward_kwargs={"format_score": 0.25})
    assert score(function, "#### 8", extra={"format_score": 0.5})["score"] == 0.25


def test_registering_checks_the_signature():
    with pytest.raises(ValueError, match="wrong signature"):
        register_reward("bad")(lambda x: 1)
    assert "bad" not in REWARD_FUNCTION_REGISTRY


# name -> ground truth, a response that scores 1, one that scores 0, other parameters
EXAMPLES = {
    "code": ("assert f() == 7", "def f(): return 7", "def f(): return 8", {}),
    "geo3k": ("7", "<think>a</think> \\boxed{7}", "\\boxed{8}", {}),
    "format": ("", "<answer>7</answer>", "7", {"tags": ["answer"]}),
    "multiple_choice": ("C", "C", "D", {}),
    "search_r1": ({"target": ["Ada", "Grace"]}, "<answer>the Ada.</answer>", "<answer>Al</answer>", {}),
    "weighted": ("7", "#### 7", "#### 8", {"rewards": [{"name": "gsm8k"}]}),
}


@pytest.mark.parametrize(
    ("name", "key", "missing", "message"),
    [
        ("model_score", "rm_score", {}, r"set reward\.reward_model\.enable=true"),
        ("agent_score", "agent_score", {"agent_score": None}, "return one from the agent"),
    ],
)
def test_scores_that_were_computed_before(name, key, missing, message):
    function = resolve_reward_function(registered=name)
    assert score(function, extra={key: -1.5}) == -1.5
    with pytest.raises(ValueError, match=message):
        score(function, extra=missing)


@pytest.mark.parametrize("name", sorted({*REWARD_FUNCTION_REGISTRY} - {"model_score", "agent_score", "judge"}))
def test_every_registered_function_keeps_the_contract(name):
    truth, right, wrong, kwargs = EXAMPLES.get(name, ("7", "#### 7", "#### 8", {}))
    function = resolve_reward_function(registered=name, reward_kwargs=kwargs)
    assert function.form == "sample" and function.func.__doc__
    scores = [read_outcome(Outcome(score(function, text, truth)))[0] for text in (right, wrong)]
    assert scores == [1.0, -1.0 if name == "math_dapo" else 0.0]


@pytest.mark.parametrize(
    "source, rule",
    [
        ("openai/gsm8k", "gsm8k_strict"),
        ("openai/gsm8k_socratic", "gsm8k_strict"),
        ("hiyouga/geometry3k", "geo3k"),
        ("math", "math_dapo"),
        ("math_dapo", "math_dapo"),
        ("math_dapo_reasoning", "math_dapo"),
        ("math500", "math_reward"),
        ("MATH", "math_dapo"),
        ("aime2024", "math_dapo"),
        ("HuggingFaceH4/aime_2024", "math_reward"),
        ("DigitalLearningGmbH/MATH-lighteval", "math_reward"),
        ("HuggingFaceH4/MATH-500", "math_reward"),
    ],
)
def test_data_sources_choose_their_rule(source, rule):
    assert rule_for(source).name == rule
    assert resolve_reward_function().for_data_source(source).name == rule


@pytest.mark.parametrize("source", ["mathvista", "my/set", "", None])
def test_an_unknown_data_source_is_refused_with_alternatives(source):
    with pytest.raises(ValueError) as error:
        default_compute_score(source, "7", "7")
    for part in (repr(source), "openai/gsm8k", "custom_reward_function.path", "register_data_source"):
        assert part in str(error.value)


def test_a_data_source_can_be_registered(monkeypatch):
    monkeypatch.setattr("verl.rewards.resolve.RULES_BY_DATA_SOURCE", dict(RULES_BY_DATA_SOURCE))
    register_data_source("my/set", lambda sampled_response, reference_answer: 0.25)
    register_data_source("my/set_hard", lambda data_source, solution_str, ground_truth: 0.75)
    found = [default_compute_score(s, "7", "7") for s in ("my/set", "my/set-2", "my/set_hard/x")]
    assert found == [0.25, 0.25, 0.75]
    with pytest.raises(ValueError, match="no reward rule"):
        default_compute_score("my/settings", "7", "7")


REFERENCES = ("42", "The answer is 42.", "Answer: 42", r"\boxed{42}", "#### 42", "6*7=<<6*7=42>>42 clips.\n#### 42")


@pytest.mark.parametrize("reference", REFERENCES)
def test_accuracy_reward_takes_the_final_answer_of_the_reference(reference):
    right = ["42", "#### 42", r"\boxed{42}", "Answer: 42", "The answer is 42.", "**Answer:** 42", "<answer>42</answer>"]
    right += ["I have 5 and 42 apples", r"The answer is:\n$\boxed{42}$", reference]
    wrong = ["", "43", "#### 43", r"\boxed{43}", "The answer is 43.", "42 or 43", "so 42.0005", "The answer is 6*7."]
    wrong += [r"42, so \boxed{43}", "The answer is 42? No, the answer is 43.", "142"]
    assert [r for r in right if accuracy_reward(r, reference) != 1.0] == []
    assert [w for w in wrong if accuracy_reward(w, reference) != 0.0] == []


MINE = """
from verl.rewards import register_reward
{decorator}
def accuracy_reward(sampled_response, reference_answer):
    return 0.7
"""


def test_a_function_of_ones_own_replaces_a_builtin_one(tmp_path, caplog):
    caplog.set_level("INFO", "verl.registry")
    path = tmp_path / "mine.py"
    path.write_text(MINE.format(decorator="@register_reward('accuracy_reward')"))
    check_registered("accuracy_reward", [import_module(str(path))])
    assert score(resolve_reward_function(registered="accuracy_reward")) == 0.7
    (line,) = caplog.messages
    assert f"{accuracy.__file__}:" in line and f"replaced by accuracy_reward() at {path}:3" in line


@pytest.mark.parametrize(("name", "said"), [("accuracy_reward", r"accuracy\.py:\d+ is"), ("other", "nothing is")])
def test_a_function_without_decorator_is_not_ignored(name, said, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.format(decorator="").replace("accuracy_reward", name))
    module = import_module(str(path))
    with pytest.raises(ValueError, match=rf"{said} registered under this name.*mine.py:4 is not: add @register_reward"):
        check_registered(name, [module])
    check_registered("gsm8k", [module])
    check_registered(None, [module])


def test_a_reward_class_is_constructed_with_its_parameters(tmp_path):
    path = tmp_path / "rare.py"
    path.write_text(
        "from verl import RewardFunction\n\n\nclass Rare(RewardFunction):\n"
        "    def __init__(self, bonus=0.5):\n        self.bonus, self.seen = bonus, set()\n\n"
        "    def __call__(self, sampled_response, reference_answer):\n"
        "        new = sampled_response not in self.seen\n        self.seen.add(sampled_response)\n"
        "        return float(sampled_response == reference_answer) + self.bonus * new\n"
    )
    function = resolve_reward_function(str(path), "Rare", reward_kwargs={"bonus": 0.25})
    assert [score(function, text) for text in ("7", "7", "8")] == [1.25, 1.0, 0.25]
    register_reward("rare")(import_module(str(path)).Rare)
    assert score(resolve_reward_function(registered="rare")) == 1.5

    def annotated(sampled_response: str, reference_answer: str) -> float:
        return 1.0

    function: RewardFunction = annotated
    assert function("7", "7") == 1.0


def test_the_rules_are_light():
    """A worker process that runs one rule does not import torch."""
    code = (
        "import sys, verl.rewards.resolve, verl.rewards.sandbox.worker; "
        "print([m for m in ('torch', 'transformers', 'sympy', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("response", "reference", "tolerance", "score"),
    [
        ("so it is 42.0005", "42", 0.0, 0.0),
        ("so it is 42.0005", "42", 1e-3, 1.0),
        ("The answer is 41.9995.", "#### 42", 1e-3, 1.0),
        ("The answer is 42.002", "42", 1e-3, 0.0),
        ("The answer is 1/3", "0.333", 1e-3, 1.0),
        ("The answer is blue", "42", 100, 0.0),
        ("1,000.5", "1000", 1, 1.0),
    ],
)
def test_accuracy_reward_with_a_tolerance(response, reference, tolerance, score):
    assert accuracy_reward(response, reference, tolerance=tolerance) == score


def test_the_page_lists_every_rule_and_data_source():
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = [re.findall(r"`(\w+)`", row[0])[0] for row in rows]
    assert sorted(names) == sorted(REWARD_FUNCTION_REGISTRY)
    routed = {source: name for name, row in zip(names, rows) for source in re.findall(r"`([^`]+)`", row[-1])}
    assert set(routed) == set(RULES_BY_DATA_SOURCE)
    for source, name in routed.items():
        assert rule_for(source).func is REWARD_FUNCTION_REGISTRY[name]


def test_the_examples_of_the_page_run():
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert failed == 0 and tried > 5
