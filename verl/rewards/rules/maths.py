r"""Mathematics: MATH, NuminaMath, AMC, AIME, DAPO, Geometry3K and others, compared by value (see `answers.compare`).

The final answer is the last `\boxed{...}` (several that are listed together are one answer); without a box, what
follows "The answer is", or the value in which the last sentence ends. For `math_dapo`, whose prompt asks for a last
line "Answer: ...", that line counts before a box.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules.answers import extract
from verl.rewards.rules.answers.rule import AnswerRule

logger = logging.getLogger(__name__)

_LONGEST = 1000  # characters of "pred"

MATH = AnswerRule("math", (extract.box, extract.whole_statement, extract.conclusion, extract.alone))
DAPO = AnswerRule("math_dapo", (extract.answer_line, extract.box, extract.statement, extract.alone))
GEO3K = AnswerRule("geo3k", (extract.box,))


@register_reward("math", bounded=True, needs_ground_truth=True)
def math_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Return 1.0 if the final answer equals the ground truth, otherwise 0.0; with "acc" and "pred", the answer.

    A comparison that takes more than 5 s of CPU time or 1 GiB scores 0.0 and logs a warning.

    Raises:
        ValueError: If the ground truth is empty or no answer (see `read_references`).
    """
    return _score(MATH, solution_str, ground_truth, wrong=0.0)


@register_reward("math_dapo", bounded=True, needs_ground_truth=True)
def math_dapo(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Return 1.0 if the final answer equals the ground truth, otherwise -1.0; "acc" is 1.0 or 0.0.

    The reward of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.1).
    """
    return _score(DAPO, solution_str, ground_truth, wrong=-1.0)


def _score(rule: AnswerRule, solution_str: str, ground_truth: Any, wrong: float) -> dict[str, Any]:
    check = rule.check(solution_str, ground_truth)
    _note_sentences(str(ground_truth))
    score = 1.0 if check.correct else wrong
    return {"score": score, "acc": float(check.correct), "pred": (check.answer.text or "").strip()[:_LONGEST]}


@lru_cache(maxsize=4096)
def _note_sentences(ground_truth: str) -> None:
    if "boxed" not in ground_truth and re.search(r"[a-z]{2}[.!?]\s+[A-Z]", ground_truth):
        logger.warning("the ground truth %.100r is several sentences without a box: no answer equals it", ground_truth)


def is_equivalent(solution_str: str, ground_truth: Any) -> bool:
    """Whether the final answer of a response equals the ground truth."""
    return MATH.check(solution_str, ground_truth).correct


@register_reward("geo3k", bounded=True, needs_ground_truth=True)
def geo3k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, format_score: float = 0.1
) -> dict[str, Any]:
    r"""Return (1 - format_score) for a correct answer in a box, plus format_score for the format.

    The score of public verl for `hiyouga/geometry3k` (Lu et al. 2021, arXiv:2105.04165); answers are compared as in
    `math`, and one that is not in a box is wrong. The format is `<think>...</think>` at the start, and `\boxed{...}`
    after it.

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
    return {"score": score, "acc": correct, "format": well_formed, "pred": (check.answer.text or "")[:_LONGEST]}


def has_format(solution_str: str) -> bool:
    r"""Whether a response starts with `<think>...</think>` and has `\boxed{...}` after that."""
    thought, closed, rest = solution_str.partition("</think>")
    return thought.startswith("<think>") and bool(closed) and "}" in rest.partition("\\boxed{")[2]
