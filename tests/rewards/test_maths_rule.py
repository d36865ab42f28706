"""The mathematics rule beside its rows in labelled_answers.jsonl: in all threads, and on hostile responses."""

import asyncio
import threading
import time

import pytest

from verl.rewards.rules import maths
from verl.rewards.rules.answers import rule
from verl.rewards.sandbox.pool import Limits
from verl.utils.boxed import last_boxed


def test_braces_nest_and_the_last_box_counts():
    assert last_boxed(r"\boxed{1} and \boxed{\frac{a}{\sqrt{b}}}") == r"\frac{a}{\sqrt{b}}"
    assert last_boxed(r"\boxed{1} and \boxed{2") is None, "it does not close, so it says nothing"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\fbox{3}") == "3"
    assert last_boxed("3") is None


def test_a_reference_may_be_a_whole_solution():
    assert maths.is_equivalent(r"\boxed{4}", r"We add 2 and 2 to get $\boxed{4}$.")


CASES_FOR_THREADS = [(r"\frac{1}{2}", "0.5", True), ("(x+1)^2", "x^2+2x+1", True), (r"2\ln 2", r"\ln 5", False)]


def _score_all():
    return [maths.is_equivalent(rf"\boxed{{{answer}}}", reference) for reference, answer, _ in CASES_FOR_THREADS]


def test_scores_are_the_same_in_a_thread_and_in_an_event_loop():
    """With its own timeouts math-verify raises or returns 0 there: signals need the main thread."""
    expected = [right for *_, right in CASES_FOR_THREADS]
    found = {}
    rule._equal_isolated.cache_clear()
    threads = [threading.Thread(target=lambda k=k: found.update({k: _score_all()})) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: expected for k in range(3)}

    async def in_a_loop():
        return _score_all(), await asyncio.to_thread(_score_all)

    assert asyncio.run(in_a_loop()) == (expected, expected)


@pytest.fixture
def short_limits(monkeypatch):
    monkeypatch.setattr(rule, "_LIMITS", Limits(wall_seconds=0.4, memory_bytes=1 << 29))
    rule._equal_isolated.cache_clear()
    rule._stops.clear()


SLOW = r"\sum_{i=1}^{300000} \frac{\sin i}{i^i}"
ANSWERS = [SLOW, "9^{9^9}", "10000000!", "(" * 300 + "1" + ")" * 300, r"\frac{" * 200 + "1"]
HOSTILE = [rf"\boxed{{{answer}}}" for answer in ANSWERS]
HOSTILE += ["9**9**9", "x " * 500_000, r"\boxed{" * 100_000, "$" * 100_000, "1/" * 100_000]  # without a box


@pytest.mark.fast("*10000000!}-main thread", "*9^{9^9}}-thread", "text[3-9]-main thread")
@pytest.mark.parametrize(
    ("text", "where"), [*((text, "main thread") for text in HOSTILE), *((text, "thread") for text in HOSTILE[:2])]
)
def test_hostile_responses_end_in_time_and_score_zero(text, where, short_limits):
    maths.is_equivalent(r"\boxed{\ln 1}", "0")  # exclude the start of the worker from the measured time
    begun, found = time.monotonic(), []
    score = lambda: found.append(maths.math_reward("math", text, "3")["acc"])  # noqa: E731
    if where == "thread":
        thread = threading.Thread(target=score)
        thread.start()
        thread.join()
    else:
        score()
    assert found == [0.0]
    assert time.monotonic() - begun < 30


def test_a_comparison_over_its_limits_is_logged(short_limits, caplog):
    maths.math_reward("math", rf"\boxed{{{SLOW}}}", "3")
    assert "did not end within 0.4 s" in caplog.text and r"\sum" in caplog.text


def test_a_repeated_hostile_response_is_compared_at_most_twice(short_limits):
    begun = time.monotonic()
    assert [maths.is_equivalent(rf"\boxed{{{SLOW}}}", "3") for _ in range(50)] == [False] * 50
    assert time.monotonic() - begun < 0.4 * 40


def test_a_stopped_comparison_is_not_remembered_as_wrong(short_limits, monkeypatch):
    """On a busy machine a right answer can exceed the limit; the next time it is compared again."""
    monkeypatch.setattr(rule, "_LIMITS", Limits(wall_seconds=1e-3, memory_bytes=1 << 29))
    assert not maths.is_equivalent(r"\boxed{\ln 4}", r"2\ln 2")
    monkeypatch.setattr(rule, "_LIMITS", Limits(wall_seconds=60.0, cpu_seconds=5.0, memory_bytes=1 << 30))
    assert maths.is_equivalent(r"\boxed{\ln 4}", r"2\ln 2")


def test_simple_responses_need_no_process(monkeypatch):
    def refuse(*_):
        raise AssertionError("a process was used")

    monkeypatch.setattr(rule, "shared_pool", refuse)
    for reference, answer in ((r"\frac{1}{2}", "0.5"), ("1/2", r"\frac12"), (r"50\%", "50"), ("2.50", r"\$2.5")):
        assert maths.is_equivalent(f"\\boxed{{{answer}}}", reference)
    assert not maths.is_equivalent("\\boxed{0.3}", r"\frac{1}{3}")


def test_a_solution_without_a_box_is_named_once(caplog):
    truth = "We add the two numbers. The sum is five."
    for _ in range(2):
        assert maths.math_reward("math500", "\\boxed{5}", truth)["score"] == 0.0
    maths.math_reward("math500", "\\boxed{5}", "Add them. So it is $\\boxed{5}$.")
    assert [r.getMessage() for r in caplog.records] == [
        f"the ground truth {truth!r} is several sentences without a box: no answer equals it"
    ]
