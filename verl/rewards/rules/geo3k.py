r"""Geometry3K (Lu et al. 2021, arXiv:2105.04165): reasoning in `<think>`, and the final answer in a box."""

from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules.answers import extract
from verl.rewards.rules.answers.rule import AnswerRule

GEO3K = AnswerRule("geo3k", (extract.box,))


@register_reward("geo3k", bounded=True, needs_ground_truth=True)
def geo3k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, format_score: float = 0.1
) -> dict[str, Any]:
    r"""Return (1 - format_score) for a correct answer in a box, plus format_score for the format.

    The score of public verl for `hiyouga/geometry3k`; answers are compared as in `math`, and one that is not in a box
    is wrong. The format is `<think>...</think>` at the start, and `\boxed{...}` after it.

    Args:
        format_score: Share of the format, from 0 to 1.

    Raises:
        ValueError: If the ground truth is empty, or format_score is not from 0 to 1.
    """
    if not 0 <= format_score <= 1:
        raise ValueError(f"geo3k: format_score: expected 0 to 1, found {format_score!r}")
    check = GEO3K.check(solution_str, ground_truth)
    correct = float(check.correct)
    well_formed = float(has_format(solution_str))
    score = (1 - format_score) * correct + format_score * well_formed
    return {"score": score, "acc": correct, "format": well_formed, "pred": (check.answer.text or "")[:1000]}


def has_format(solution_str: str) -> bool:
    r"""Whether a response starts with `<think>...</think>` and has `\boxed{...}` after that."""
    thought, closed, rest = solution_str.partition("</think>")
    return thought.startswith("<think>") and bool(closed) and "}" in rest.partition("\\boxed{")[2]
