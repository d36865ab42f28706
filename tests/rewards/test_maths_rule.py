"""The mathematics rule against labels by hand, in all threads, and on hostile responses."""

import asyncio
import threading
import time

import pytest

from verl.rewards.rules import maths
from verl.rewards.rules.answers import rule
from verl.rewards.sandbox.pool import Limits
from verl.utils.boxed import last_boxed

# (ground truth, boxed answer, equivalent?)
LABELLED = [
    (r"\frac{1}{2}", "0.5", True),
    ("1/2", r"\frac12", True),
    ("0.5", r"\dfrac{1}{2}", True),
    ("1/2", r"50\%", True),
    (r"50\%", r"\frac{1}{2}", True),
    (r"50\%", "50", True),
    ("0.5", "5", False),
    (r"\frac{1}{3}", "0.3333333333", False),  # a decimal is no approximation
    (r"\frac{1}{3}", "0.3", False),
    (r"1\frac{1}{2}", "1.5", True),
    (r"-\frac{1}{2}", r"\frac{-1}{2}", True),
    (r"-\frac{1}{2}", r"\frac{1}{2}", False),
    ("7", "7.0", True),
    ("7", "8", False),
    ("1000", "1,000", True),
    ("1{,}000", "1000", True),
    ("1000", r"1\,000", True),
    ("10", r"10\text{ cm}", True),
    (r"10\text{ cm}", "10", True),
    ("12", r"12\text{ cm}^2", True),
    (r"90^\circ", "90", True),
    (r"\$5", "5", True),
    ("2.50", r"\$2.5", True),
    ("5", "x=5", True),
    (r"3\sqrt{2}", r"\sqrt{18}", True),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
    (r"3\sqrt{2}", r"2\sqrt{3}", False),
    (r"2\pi", r"\pi\cdot 2", True),
    ("1500", r"1.5\times 10^3", True),
    ("1024", "2^{10}", True),
    ("120", "5!", True),
    ("x+1", "1+x", True),
    ("(x+1)^2", "x^2+2x+1", True),
    ("x^2", "x**2", True),
    ("p-q", "q-p", False),
    ("a", "b", False),
    (r"2\ln 2", r"\ln 4", True),
    ("(1,2)", r"\left( 1, 2 \right)", True),
    ("(3,5)", "(5,3)", False),
    ("[0,1)", r"\left[0,1\right)", True),
    ("[0,1)", "(0,1)", False),
    ("[2,3]", "(2,3)", False),
    (r"(-\infty,2)", "x<2", True),
    ("x<2", r"(-\infty,2)", True),
    (r"(-\infty,2)\cup(2,\infty)", r"(-\infty, 2) \cup (2, \infty)", True),
    (r"\{1,2,3\}", r"\{3,1,2\}", True),
    (r"\{1,2,3\}", r"\{1,2\}", False),
    ("1,2", "2,1", True),
    (r"\pm 2", "2,-2", True),
    (r"\emptyset", r"\varnothing", True),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2\\ 3 & 4\end{bmatrix}", True),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", False),
    (r"\begin{pmatrix}\sqrt{3}\\1\end{pmatrix}", r"\begin{pmatrix}\sqrt(3)\\1\end{pmatrix}", True),
    (r"\begin{pmatrix}1\\\sqrt{3}\end{pmatrix}", r"\begin{pmatrix}1\\\sqrt(3)\end{pmatrix}", True),
    (r"\begin{pmatrix}1\\\sqrt{3}\end{pmatrix}", r"\begin{pmatrix}1\\sqrt(3)\end{pmatrix}", True),
    ("y=2x+1", "2x-y+1=0", True),
    ("1+2i", "2i+1", True),
    (r"\text{Monday}", "Monday", True),
    ("even", r"\text{even}", True),
    ("even", "neve", False),
    (r"\text{(A)}", "A", True),
    ("C", r"\text{C}", True),
    ("C", "D", False),
    ("yes", "Yes", True),
]


@pytest.mark.parametrize("reference, answer, right", LABELLED)
def test_boxed_responses_agree_with_their_labels(reference, answer, right):
    text = f"First \\boxed{{17}}, no: the answer is $\\boxed{{{answer}}}$."
    assert maths.math_reward("math", text, reference)["score"] == float(right)


@pytest.mark.parametrize(
    "text, reference, right",
    [
        ("The answer is $\\frac{1}{2}$.", "0.5", True),
        ("So x is 3", "3", True),
        ("The answer is x+1", "x+1", True),
        ("Final answer: Monday.", "Monday", True),
        (r"\boxed{\frac{1}{2}", "1/2", False),  # the length limit cut it off: 1/20 begins so, too
        ("I give up", "3", False),
        ("", "3", False),
    ],
)
def test_responses_without_a_box(text, reference, right):
    assert maths.is_equivalent(text, reference) is right


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
    monkeypatch.setattr(rule, "_LIMITS", Limits(wall_seconds=0.7, memory_bytes=1 << 29))
    rule._equal_isolated.cache_clear()
    rule._stops.clear()


SLOW = r"\sum_{i=1}^{300000} \frac{\sin i}{i^i}"
ANSWERS = [SLOW, "9^{9^9}", "10000000!", "(" * 300 + "1" + ")" * 300, r"\frac{" * 200 + "1"]
HOSTILE = [rf"\boxed{{{answer}}}" for answer in ANSWERS]
HOSTILE += ["9**9**9", "x " * 500_000, r"\boxed{" * 100_000, "$" * 100_000, "1/" * 100_000]  # without a box


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("where", ["main thread", "thread"])
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
    assert time.monotonic() - begun < 3


def test_a_comparison_over_its_limits_is_logged(short_limits, caplog):
    maths.math_reward("math", rf"\boxed{{{SLOW}}}", "3")
    assert "did not end within 0.7 s" in caplog.text and r"\sum" in caplog.text


def test_a_repeated_hostile_response_is_compared_at_most_twice(short_limits):
    begun = time.monotonic()
    assert [maths.is_equivalent(rf"\boxed{{{SLOW}}}", "3") for _ in range(50)] == [False] * 50
    assert time.monotonic() - begun < 5


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
    for reference, answer, right in LABELLED[:12]:
        assert maths.is_equivalent(f"\\boxed{{{answer}}}", reference) is right
