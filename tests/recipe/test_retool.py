"""verl/recipe/retool: what is printed, and the reward."""

import pytest

from verl.recipe.retool.interpreter import compute_score, printing


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("6 * 7", "print(6 * 7)"),
        ("```python\nx = 6\nx * 7\n```", "x = 6\nprint(x * 7)"),
        ("print(1)", "print(1)"),
        ("x = 1", "x = 1"),
        ("6 *", "6 *"),
        ("```py\nif x:\n    y\n```", "if x:\n    y"),
        ("", ""),
    ],
)
def test_the_value_of_the_last_line_is_printed(code, expected):
    assert printing(code) == expected


@pytest.mark.parametrize(
    ("response", "runs", "bonus", "score"),
    [
        (r"so \boxed{42}", 0, 0.1, 1.0),
        (r"\boxed{41} no, \boxed{42}", 2, 0.1, 1.0),
        ("The answer is 42", 0, 0.1, -1.0),  # not in a box
        (r"\boxed{41}", 0, 0.1, -1.0),
        (r"\boxed{41}", 1, 0.1, -0.9),
        (r"\boxed{41}", 9, 0.1, -0.6),
        (r"\boxed{41}", 9, 0, -1.0),
    ],
)
def test_the_reward(response, runs, bonus, score):
    info = {"num_turns": 2 + 2 * runs}
    result = compute_score("retool", response, "42", info, code_bonus=bonus)
    assert result["score"] == pytest.approx(score) and result["acc"] == (score == 1)
