"""Question answering in the form of Search-R1 (Jin et al. 2025, arXiv:2503.09516): Natural Questions, HotpotQA, ..."""

import re
import string
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules.answers import extract
from verl.rewards.rules.answers.rule import AnswerRule

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def match_normalized(answer: str, reference: str) -> bool:
    """Whether two texts are equal without case, punctuation, articles and surplus whitespace."""
    return bool(_plain(answer)) and _plain(answer) == _plain(reference)


def _plain(text: str) -> str:
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text.casefold().translate(_PUNCTUATION)).split())


SEARCH_R1 = AnswerRule("search_r1", (extract.tag,), match_normalized)


@register_reward("search_r1", bounded=True, needs_ground_truth=True)
def search_r1(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Return 1.0 if the last `<answer>...</answer>` is an accepted answer, otherwise 0.0; with "acc" and "pred".

    The exact match of public verl for `searchR1_*`.

    Args:
        ground_truth: {"target": [...]}, a list or a text.

    Raises:
        ValueError: If the ground truth is empty or no answer.
    """
    check = SEARCH_R1.check(solution_str, ground_truth)
    return {"score": float(check.correct), "acc": float(check.correct), "pred": check.answer.text or ""}
