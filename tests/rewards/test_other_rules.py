"""Multiple choice, code, format and length rewards, and weighted sums of rewards."""

import json
import threading
import time
from pathlib import Path

import pytest

from verl.rewards import resolve_reward_function
from verl.rewards.rules.choice import extract_choice, multiple_choice
from verl.rewards.rules.formats import format_reward, length_reward
from verl.rewards.sandbox.code_tests import code_reward, extract_code, same_output

SAMPLES = str(Path(__file__).with_name("sample_rewards.py"))

# ---- multiple choice ------------------------------------------------------------------------------------------------

#: letter -> responses whose answer it is
CHOICES: dict[str | None, list[str]] = {}
CHOICES["B"] = ["B", "b", " B.", "(B)", "B) Paris", "**B**", "B. Paris, because it is the capital", "The answer is B"]
CHOICES["B"] += ["The answer is B.", "The answer is (B).", "The answer is **(B)**.", "The correct answer is option B"]
CHOICES["B"] += ["Answer: B", "**Answer:** B", "Answer: (B) Paris", "ANSWER: B", "the answer is b"]
CHOICES["B"] += ["<think>A or B?</think><answer>B</answer>"]
CHOICES["A"] = ["The answer must be A, not B", "The answer is A because of this"]
CHOICES["D"] = ["A is wrong. C is wrong. The answer is D because it fits", r"so \boxed{D}", r"so \boxed{\text{D}}"]
CHOICES["D"] += [r"so \boxed{\text{(D)}}", r"\boxed{D. 42}"]
CHOICES["C"] = ["I first thought the answer is A, but the answer is C.", "I choose C", "I would pick option C here"]
CHOICES["C"] += ["So the right choice is C.", "#### C", "Let us see.\nA. no\nB. no\nC. yes\n\nC"]
CHOICES["C"] += ["Because of that it is (C)"]
CHOICES[None] = ["A dog has four legs", "It's unclear", "I do not know", "", "The answer is Z"]


@pytest.mark.parametrize(("text", "letter"), [(text, letter) for letter, texts in CHOICES.items() for text in texts])
def test_the_letter_that_a_reader_would_take(text, letter):
    assert extract_choice(text) == letter


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
    "repeated", ["answer ", "answer: ", "(", "A", "A.", "answer" + " " * 5, "* ", "\\boxed{", "<answer>"]
)
def test_no_text_takes_long(repeated):
    begun = time.thread_time()  # not the time of other processes
    extract_choice(repeated * (200_000 // len(repeated)))
    assert time.thread_time() - begun < 1.0


# ---- code -----------------------------------------------------------------------------------------------------------


def response(code):
    return f"We do it like this:\n```python\n{code}\n```\nThat is all."


INPUTS = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}
CALLS = {"fn_name": "double", "inputs": [[1], [2], [3]], "outputs": [2, [4], "6"]}
ASSERTS = {"test_list": ["assert double(1) == 2", "assert double(3) == 6"]}
CHECK = {"test": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "double"}
PROGRAM, FUNCTION = "print(2 * int(input()))", "def double(x):\n    return 2 * x"


@pytest.mark.parametrize(
    "code, tests",
    [(PROGRAM, INPUTS), (PROGRAM, json.dumps(INPUTS)), (FUNCTION, CALLS), (FUNCTION, ASSERTS), (FUNCTION, CHECK)]
    + [(FUNCTION, ASSERTS["test_list"]), (FUNCTION, "assert double(1) == 2")]
    + [("class Solution:\n    def double(self, x):\n        return 2 * x", CALLS)],
)
def test_a_right_program_passes(code, tests):
    assert code_reward("apps", response(code), tests) == {"score": 1.0, "acc": 1.0, "passed": 1.0}


@pytest.mark.parametrize(
    "code, tests",
    [("print(3 * int(input()))", INPUTS), ("print(2 *", INPUTS), ("def double(x):\n    return x", ASSERTS)]
    + [("def double(x):\n    return str(2 * x)", CALLS), ("def triple(x):\n    return 2 * x", CALLS)],
)
def test_a_wrong_program_fails(code, tests):
    assert code_reward("apps", response(code), tests)["score"] == 0.0


@pytest.mark.parametrize(
    "code", ["print(2 * int(input()) if input is None else 2)", "x = int(input())\nprint(2 if x < 2 else 0)"]
)
def test_partial_scores_the_fraction_of_passed_tests(code):
    assert code_reward("apps", response(code), INPUTS, partial=True)["score"] == pytest.approx(1 / 3)


def test_a_call_that_fails_leaves_those_before_it():
    code = "def double(x):\n    return 2 * x if x < 3 else 1 / 0"
    assert code_reward("apps", response(code), CALLS, partial=True)["score"] == pytest.approx(2 / 3)


HOSTILE = {
    "endless loop": "while True: pass",
    "asleep": "import time\ntime.sleep(1000)",
    "9**9**9": "9**9**9",
    "memory": "x = bytearray(1 << 33)",
    "output": "while True: print('a' * 100000)",
    "children": "import subprocess\nsubprocess.Popen(['sleep', '1000'])\nprint('x' * 10)",
    "nesting": "print('[' * 100000)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_end_in_time(name):
    begun = time.monotonic()
    found = []
    score = lambda: found.append(code_reward("apps", response(HOSTILE[name]), INPUTS, timeout=1.0)["score"])  # noqa: E731
    thread = threading.Thread(target=score)
    thread.start()
    thread.join(20)
    assert found == [0.0] and time.monotonic() - begun < 10


def test_invalid_json_results_fail_the_test():
    code = "import builtins, json\njson.dumps = lambda x: '[' * 100000\ndef double(x):\n    return x"
    assert code_reward("apps", response(code), CALLS)["score"] == 0.0


@pytest.mark.parametrize(
    "text, code",
    [
        ("```python\na\n```\nand\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("no fence", "no fence"),
        ("```python\na = 1\nb = 2", "a = 1\nb = 2"),
    ],
)
def test_the_last_block_is_the_program(text, code):
    assert extract_code(text) == code


@pytest.mark.parametrize(
    "found, expected, same",
    [("1 2\n3\n", "1 2 \n3", True), ("1.0000001", "1.0", True), ("1", "2", False), ("1\n2", "1 2", False)]
    + [("yes", "YES", False), ("0.5", "0.6", False), ("10", "1e1", False), ("", "", True)],
)
def test_outputs_are_compared_by_line_and_word(found, expected, same):
    assert same_output(found, expected) is same


# ---- format and length ----------------------------------------------------------------------------------------------


FORMATTED = ["<think>a</think><answer>b</answer>", "  <think>\na\n</think>\n\n<answer>b</answer>\n"]
OTHERS = ["<think></think><answer>b</answer>", "<answer>b</answer><think>a</think>", "<think>a</think><answer>b", "b"]
OTHERS += ["<think>a</think> so <answer>b</answer>", "<think>a</think><answer>b</answer> bye"]
OTHERS += ["<think>a</think><think>a</think><answer>b</answer>", "<think>a<answer>b</think></answer>"]


@pytest.mark.parametrize("text", [*FORMATTED, *OTHERS])
def test_format(text):
    assert format_reward("x", text, None) == float(text in FORMATTED)


def test_format_with_other_tags():
    assert format_reward("x", "<plan>a</plan>", None, tags=["plan"]) == 1.0


@pytest.mark.parametrize("length, score", [(0, 1.0), (100, 1.0), (150, 0.75), (200, 0.5), (300, 0.0), (900, 0.0)])
def test_length(length, score):
    assert length_reward("x", "", None, {"response_length": length}, free=100, limit=300) == score


def test_length_counts_words_if_the_token_count_is_unknown():
    assert length_reward("x", "one two three", None, limit=6) == 0.5


# ---- weighted sums --------------------------------------------------------------------------------------------------


def weighted(*rewards):
    function = resolve_reward_function(registered="weighted", reward_kwargs={"rewards": list(rewards)})
    return lambda text, truth, source="gsm8k": function(
        data_source=source, solution_str=text, ground_truth=truth, extra_info={"response_length": 50}
    )


def test_the_sum_of_rewards_and_each_of_them():
    score = weighted(
        {"name": "data_source"},
        {"name": "format", "weight": 0.2, "kwargs": {"tags": ["answer"]}},
        {"name": "length", "weight": -0.1, "label": "short", "kwargs": {"limit": 100}},
        {"path": SAMPLES, "name": "compute_score", "weight": 2},
    )
    found = score("<answer>#### 7</answer>", "7")
    assert found.pop("score") == pytest.approx(1.0 + 0.2 - 0.1 * 0.5 + 0.0)
    assert found == {"acc": 1.0, "pred": "7", "data_source": 1.0, "format": 1.0, "short": 0.5, "compute_score": 0.0}
    assert score(r"\boxed{7}", "7", "math")["score"] == pytest.approx(1.0 - 0.05)


def test_a_term_without_a_score_is_named(tmp_path):
    path = tmp_path / "none.py"
    path.write_text("def f(solution_str, ground_truth, **kwargs):\n    pass\n")
    with pytest.raises(ValueError, match=r"reward 'f', f\(\) at .*none.py:1, returned None"):
        weighted({"path": str(path), "name": "f"})("7", "7")


def test_an_expected_output_above_1_mib_can_be_printed():
    expected = " ".join(map(str, range(200_000)))
    assert len(expected) > 1 << 20
    tests = {"inputs": ["200000"], "outputs": [expected]}
    assert code_reward("test", "n = int(input())\nprint(*range(n))", tests)["acc"] == 1.0
    assert code_reward("test", "while True: print('x' * 1000)", tests)["acc"] == 0.0
