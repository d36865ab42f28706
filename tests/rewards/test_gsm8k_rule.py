"""The GSM8K rule beside its rows in labelled_answers.jsonl: its limits, the data set, equality, time."""

import json
import re
import time
from pathlib import Path

import pytest

from verl.rewards.rules import gsm8k

# Known disagreements, limits of the rule: (response, final answer by a reader, by the rule).
BEYOND = [
    ("Natalia sold 72 clips. I hope this helps with your 2 questions.", 72, 2),
    ("It would take 15 hours to clean 45 rooms.", 15, 45),
    ("The answer is not 5 but 6.", 6, None),
    ("Since x = 5 and y = 3, the sum is 8.", 8, 3),
    ("Seventy-two clips were sold.", 72, None),
    ("9" * 5000, 0, None),
]
DATA = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="GSM8K is not here")


@pytest.mark.parametrize("text, reader, rule", BEYOND)
def test_what_a_reader_understands_beyond_the_rule(text, reader, rule):
    assert gsm8k.extract(text, "flexible") == rule != reader


@pytest.mark.parametrize(
    "answer, truth, score",
    [("#### 1000", "1,000.00", 1.0), ("#### 1,000", 1000, 1.0), ("#### .5", 0.5, 1.0), ("#### 7", "#### 7", 1.0)]
    + [("#### 1001", "1000", 0.0), ("1000", "1000", 0.0), ("#### 1e3", "1000", 0.0)],
)
def test_equality_is_that_of_numbers(answer, truth, score):
    assert gsm8k.gsm8k_strict("openai/gsm8k", answer, truth)["score"] == score


def test_format_score_is_for_a_wrong_number_only():
    results = [gsm8k.gsm8k_strict("gsm8k", t, "7", format_score=0.1) for t in ("#### 7.0", "#### 8", "8")]
    assert [r["score"] for r in results] == [1.0, 0.1, 0.0]
    assert [r["acc"] for r in results] == [1.0, 0.0, 0.0]
    assert [r["pred"] for r in results] == ["7", "8", ""]


@needs_data
@pytest.mark.parametrize("split, rows", [("test", 1319), ("train", 7473)])
def test_solutions_that_people_wrote(split, rows):
    """Also without the line `####`. Most of those that differ then are errors in the data, such as $0.25 for 25."""
    solutions = [json.loads(line)["answer"] for line in (DATA / f"{split}.jsonl").read_text().splitlines()]
    assert len(solutions) == rows
    parts = [solution.partition("####") for solution in solutions]
    for solution, (_, _, number) in zip(solutions, parts):
        truth = number.strip().replace(",", "")
        assert gsm8k.gsm8k_strict("openai/gsm8k", solution, truth)["acc"] == 1.0
        assert gsm8k.gsm8k_flexible("openai/gsm8k", solution, float(truth))["acc"] == 1.0
    for notes in ("", "<<.*?>>"):  # removed: nothing, the calculator annotations
        answers = [gsm8k.extract(re.sub(notes, "", work).strip(), "flexible") for work, _, _ in parts]
        assert sum(a == gsm8k.parse_number(n.strip()) for a, (_, _, n) in zip(answers, parts)) / rows > 0.993


FRAGMENTS = ["#", "####", "1", "1,", "-$", "1 ", "1/", ". ", "1.1", "$ ", "1 000", "#### 1 "]
FRAGMENTS += ["answer is ", "answer **", "= 1", "**1", "so ", "because 1 ", "\\boxed{", "rounds to "]


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_no_text_takes_long(fragment):
    text = fragment * (1_000_000 // len(fragment))
    begun = time.thread_time()
    gsm8k.extract(text, "strict"), gsm8k.extract(text, "flexible")
    assert time.thread_time() - begun < 2.0


def test_the_rule_stays_cheap():
    """More than 20,000 responses per second of CPU time: the rules run in the trainer's process."""
    text = "He sold 48 clips in April and 48/2 = 24 in May, so 48 + 24 = 72 in all. " * 5 + "\n#### 72"
    begun = time.process_time()
    for _ in range(5000):
        gsm8k.gsm8k_strict("openai/gsm8k", text, "72")
        gsm8k.gsm8k_flexible("openai/gsm8k", text, "72")
    assert 10_000 / (time.process_time() - begun) > 20_000
