"""Multiple choice, geometry, code and format rewards, and weighted sums of rewards."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from verl.rewards import resolve_reward_function
from verl.rewards.resolve import format_reward
from verl.rewards.rules.choice import extract_choice, multiple_choice
from verl.rewards.rules.maths import geo3k, has_format
from verl.rewards.sandbox.code_tests import code_reward, same_output

SAMPLES = str(Path(__file__).with_name("sample_rewards.py"))

# ---- multiple choice ------------------------------------------------------------------------------------------------


def test_letters_end_with_the_choices_and_their_texts_count():
    cities = ["Rome", "Paris", "Bern"]
    assert extract_choice("The answer is D", cities) is None
    assert extract_choice("The answer is Paris.", cities) == "B"
    assert extract_choice("paris", cities) == "B"


@pytest.mark.parametrize("truth", ["B", "(b)", 1])
def test_the_reference_is_a_letter_or_a_position(truth):
    assert multiple_choice("mmlu", "The answer is B", truth) == {"score": 1.0, "acc": 1.0, "pred": "B"}
    assert multiple_choice("mmlu", "The answer is C", truth)["score"] == 0.0


@pytest.mark.parametrize(
    "choices",
    [
        {"choices": ["Rome", "Paris"]},
        {"options": ["Rome", "Paris"]},  # MMLU-Pro
        {"options": ["A)Rome", "B)Paris"]},  # AQuA-RAT
        {"options": {"A": "Rome", "B": "Paris"}},  # MedQA
        {"options": "a ) Rome , b ) Paris"},  # MathQA
        {"choices": {"text": np.array(["Rome", "Paris"]), "label": np.array(["A", "B"])}},  # ARC, of parquet
    ],
)
def test_choices_are_read_in_all_their_forms(choices):
    for truth in ("B", "Paris"):
        scores = [
            multiple_choice("mmlu", f"The answer is {text}.", truth, choices)["score"] for text in ("Paris", "Rome")
        ]
        assert scores == [1.0, 0.0]


@pytest.mark.parametrize(
    "repeated", ["answer ", "answer: ", "(", "A", "A.", "answer" + " " * 5, "* ", "\\boxed{", "<answer>"]
)
def test_no_text_takes_long(repeated):
    begun = time.thread_time()  # not the time of other processes
    extract_choice(repeated * (200_000 // len(repeated)))
    assert time.thread_time() - begun < 1.0


# ---- geometry -------------------------------------------------------------------------------------------------------

GEOMETRY = "<think>a</think> so \\boxed{2\\sqrt{221}}"


@pytest.mark.parametrize(
    "response, score",
    [
        (GEOMETRY, 1.0),
        ("<think>a</think>\n\\boxed{ \\sqrt { 884 } }", 1.0),  # 884 = 4 * 221
        ("\\boxed{2\\sqrt{221}}", 0.9),
        ("<think>a</think> so \\boxed{3}", 0.1),
        ("<think>a</think> so 2\\sqrt{221}", 0.0),  # not in a box
        ("so <think>a</think> \\boxed{2\\sqrt{221}}", 0.9),  # does not start with <think>
        ("\\boxed{3} <think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_geo3k(response, score):
    result = geo3k("hiyouga/geometry3k", response, "2 \\sqrt { 221 }")
    assert result["score"] == pytest.approx(score) and result["acc"] == float(score > 0.5)


def test_the_share_of_the_format():
    assert geo3k("", "\\boxed{5}", "5", format_score=0.25)["score"] == 0.75
    with pytest.raises(ValueError, match="expected 0 to 1, found 2"):
        geo3k("", GEOMETRY, "5", format_score=2)
    with pytest.raises(ValueError, match="expected a non-empty text"):
        geo3k("", GEOMETRY, "")


def test_the_format_needs_time_linear_in_the_length():
    assert not has_format("<think>" + "</think" * 100_000 + "\\boxed{" * 100_000)


# ---- format ----------------------------------------------------------------------------------------------


FORMATTED = ["<think>a</think><answer>b</answer>", "  <think>\na\n</think>\n\n<answer>b</answer>\n"]
OTHERS = ["<think></think><answer>b</answer>", "<answer>b</answer><think>a</think>", "<think>a</think><answer>b", "b"]
OTHERS += ["<think>a</think> so <answer>b</answer>", "<think>a</think><answer>b</answer> bye"]
OTHERS += ["<think>a</think><think>a</think><answer>b</answer>", "<think>a<answer>b</think></answer>"]


@pytest.mark.parametrize("text", [*FORMATTED, *OTHERS])
def test_format(text):
    assert format_reward("x", text, None) == float(text in FORMATTED)


def test_format_with_other_tags():
    assert format_reward("x", "<plan>a</plan>", None, tags=["plan"]) == 1.0


# ---- weighted sums --------------------------------------------------------------------------------------------------


def weighted(*rewards):
    function = resolve_reward_function(registered="weighted", reward_kwargs={"rewards": list(rewards)})
    return lambda text, truth, source="gsm8k": function(data_source=source, solution_str=text, ground_truth=truth)


def test_the_sum_of_rewards_and_each_of_them():
    score = weighted(
        {"name": "data_source"},
        {"name": "format", "weight": 0.2, "kwargs": {"tags": ["answer"]}},
        {"name": "format", "weight": -0.1, "label": "thinks", "kwargs": {"tags": ["think"]}},
        {"path": SAMPLES, "name": "compute_score", "weight": 2},
    )
    found = score("<answer>#### 7</answer>", "7")
    assert found.pop("score") == pytest.approx(1.0 + 0.2 - 0.1 * 0.0 + 0.0)
    assert found == {"acc": 1.0, "pred": "7", "data_source": 1.0, "format": 1.0, "thinks": 0.0, "compute_score": 0.0}
    assert score(r"<think>\boxed{7}</think>", "7", "math")["score"] == pytest.approx(-1.0 - 0.1)


def test_a_term_without_a_score_is_named(tmp_path):
    path = tmp_path / "none.py"
    path.write_text("def f(solution_str, ground_truth, **kwargs):\n    pass\n")
    with pytest.raises(ValueError, match=r"reward 'f', f\(\) at .*none.py:1, returned None"):
        weighted({"path": str(path), "name": "f"})("7", "7")


# ---- code -----------------------------------------------------------------------------------------------------------

INPUTS = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}
CALLED = {"fn_name": "double", "inputs": [[1], [2], [3]], "outputs": [2, [4], "6"]}


@pytest.mark.parametrize(
    ("code", "tests", "passed"),
    [
        ("print(2 * int(input()) if input is None else 2)", INPUTS, 1 / 3),
        ("x = int(input())\nprint(2 if x < 2 else 0)", INPUTS, 1 / 3),
        ("def double(x):\n    return 2 * x if x < 3 else 1 / 0", CALLED, 2 / 3),  # a call that fails
        ("def double(x):\n    return str(2 * x)", CALLED, 1 / 3),  # only the last one expects text
        ("import builtins, json\njson.dumps = lambda x: '[' * 100000\ndef double(x):\n    return x", CALLED, 0),
    ],
)
def test_partial_scores_the_fraction_of_passed_tests(code, tests, passed):
    result = code_reward("apps", code, tests, partial=True)
    assert result == {"score": pytest.approx(passed), "acc": 0.0, "passed": pytest.approx(passed)}


@pytest.mark.parametrize(
    "code", ["import time\ntime.sleep(1000)", "while True: print('a' * 100000)", "print('[' * 100000)"]
)
def test_hostile_programs_end_in_time_in_any_thread(code):
    begun, scores = time.monotonic(), []
    thread = threading.Thread(target=lambda: scores.append(code_reward("apps", code, INPUTS, timeout=0.5)["score"]))
    thread.start()
    thread.join(20)
    assert scores == [0.0] and time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "found, expected, same",
    [("1 2\n3\n", "1 2 \n3", True), ("1.0000001", "1.0", True), ("1", "2", False), ("1\n2", "1 2", False)]
    + [("yes", "YES", False), ("0.5", "0.6", False), ("10", "1e1", False), ("", "", True)],
)
def test_outputs_are_compared_by_line_and_word(found, expected, same):
    assert same_output(found, expected) is same


def test_an_expected_output_above_1_mib_can_be_printed():
    expected = " ".join(map(str, range(200_000)))
    assert len(expected) > 1 << 20
    tests = {"inputs": ["200000"], "outputs": [expected]}
    assert code_reward("test", "n = int(input())\nprint(*range(n))", tests)["acc"] == 1.0
    assert code_reward("test", "while True: print('x' * 1000)", tests)["acc"] == 0.0
