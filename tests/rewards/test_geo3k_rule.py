"""Geometry3K: 0.9 for the answer in a box, 0.1 for the format."""

import pytest

from verl.rewards.rules.geo3k import geo3k, has_format

GOOD = "<think>a</think> so \\boxed{2\\sqrt{221}}"


@pytest.mark.parametrize(
    "response, score",
    [
        (GOOD, 1.0),
        ("<think>a</think>\n\\boxed{ \\sqrt { 884 } }", 1.0),  # 884 = 4 * 221
        ("\\boxed{2\\sqrt{221}}", 0.9),
        ("<think>a</think> so \\boxed{3}", 0.1),
        ("<think>a</think> so 2\\sqrt{221}", 0.0),  # not in a box
        ("so <think>a</think> \\boxed{2\\sqrt{221}}", 0.9),  # does not start with <think>
        ("\\boxed{3} <think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_scores(response, score):
    found = geo3k("hiyouga/geometry3k", response, "2 \\sqrt { 221 }")
    assert found["score"] == pytest.approx(score) and found["acc"] == float(score > 0.5)


def test_the_share_of_the_format():
    assert geo3k("", "\\boxed{5}", "5", format_score=0.25)["score"] == 0.75
    with pytest.raises(ValueError, match="expected 0 to 1, found 2"):
        geo3k("", GOOD, "5", format_score=2)
    with pytest.raises(ValueError, match="expected a non-empty text"):
        geo3k("", GOOD, "")


def test_the_format_needs_time_linear_in_the_length():
    assert not has_format("<think>" + "</think" * 100_000 + "\\boxed{" * 100_000)
