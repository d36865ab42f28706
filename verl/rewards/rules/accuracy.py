r"""Short answers, numbers or words: `accuracy_reward`, and `search_r1` for question answering.

For `accuracy_reward`, the final answer of a text is the content of `<answer>...</answer>` at its end; otherwise the
last `\boxed{...}`, or what follows the last "answer is", "answer:" or "####" on the same line, whichever comes later;
without any of these, the number in which the last sentence ends.
"""

import re
import string
from fractions import Fraction
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules import gsm8k
from verl.rewards.rules.answers import extract
from verl.rewards.rules.answers.extract import Answer
from verl.rewards.rules.answers.quantities import parse_spelled_number
from verl.rewards.rules.answers.rule import AnswerRule, is_equal, read_references

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LEADING_ZERO = re.compile(r"-?0[0-9]")
_TEXT = re.compile(r"\\text(?:bf)?\{([^{}]*)\}")
_CALCULATION = re.compile(r"[0-9)]\s*(?:[*+×^]|\\times|\\cdot)\s*[0-9(]")


def _tag_at_end(text: str) -> Answer | None:
    return extract.tag(text) if text.rstrip()[-9:].lower() == "</answer>" else None


def _last_number(text: str) -> Answer | None:
    if extract.is_hedged(extract.last_sentence(text)):
        return Answer(None, "the last sentence leaves the answer open")
    number = gsm8k.extract(text, "flexible")
    return None if number is None else Answer(str(number), "last number")


def _equal(answer: str, reference: str) -> bool:
    """Equal as in `compare`, but p% is no fraction, and numbers in words and with leading zeros ("007") are text."""
    if _plain(answer) == _plain(reference):
        return True
    if _LEADING_ZERO.match(reference) or _LEADING_ZERO.match(answer) or parse_spelled_number(answer) is not None:
        return False
    if "=" not in answer and _CALCULATION.search(answer) and not _CALCULATION.search(reference):
        return False  # 6*7 states no final answer
    if ("%" in answer) != ("%" in reference):
        answer, reference = answer.replace("\\%", "").replace("%", ""), reference.replace("\\%", "").replace("%", "")
    return is_equal(answer, reference)


def _plain(text: str) -> str:
    """Normalize case, whitespace, emphasis, math delimiters and closing punctuation."""
    return " ".join(_TEXT.sub(r"\1", text).casefold().split()).strip("*_`'\"$ ").rstrip(".?,;:*_`'\"$ ")


ACCURACY = AnswerRule(
    "accuracy_reward", (_tag_at_end, extract.statement, extract.tag, extract.alone, _last_number), _equal
)


@register_reward("accuracy_reward", bounded=True, needs_ground_truth=True)
def accuracy_reward(sampled_response: str, reference_answer: Any, tolerance: float = 0.0) -> float:
    """Return 1.0 if the final answer of the response equals that of the reference, otherwise 0.0 (see `final_answer`).

    - A number is compared as a number: 1,000 equals 1000.0. By default there is no `tolerance`, the largest
      accepted difference. If the response states no final answer, its last number counts: "I have 5 and 42 apples"
      matches the reference 42, but not 5.
    - A number with a unit ("42 apples") equals the number alone and the same text. p% equals p.
    - Words are compared as words, ignoring case, surrounding whitespace, emphasis and closing punctuation. A number
      with leading zeros ("007") is text.
    - The reference may be text, a number, a list (any of) or a mapping (see `read_references`); a worked solution
      counts by its final answer.

    Raises:
        ValueError: If the reference, or its final answer, is empty or no answer.
    """
    references = [final_answer(text) for text in read_references(reference_answer, "accuracy_reward")]
    check = ACCURACY.check(sampled_response, references)
    return float(check.correct or (tolerance > 0 and _is_near(check.answer.text, references, tolerance)))


def _is_near(answer: str | None, references: list[str], tolerance: float) -> bool:
    """Whether the answer and a reference are numbers that differ by at most the tolerance."""
    number, *accepted = (_number(text or "") for text in (answer, *references))
    return number is not None and any(n is not None and abs(n - number) <= tolerance for n in accepted)


def _number(text: str) -> Fraction | None:
    """The value of a decimal number or fraction; None for other text."""
    try:
        return Fraction(_plain(text).replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def final_answer(text: str) -> str:
    """Return the final answer stated in a text (see the module docstring); the whole text if none is stated."""
    stated = _tag_at_end(text) or extract.statement(text)
    if stated is not None and not stated.text:
        raise ValueError(f"accuracy_reward: the reference answer is empty: {text!r}")
    return text if stated is None else stated.text


# ---- question answering ----------------------------------------------------------------------------------------------


def match_normalized(answer: str, reference: str) -> bool:
    """Whether two texts are equal without case, punctuation, articles and surplus whitespace."""
    return bool(_normalized(answer)) and _normalized(answer) == _normalized(reference)


def _normalized(text: str) -> str:
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text.casefold().translate(_PUNCTUATION)).split())


SEARCH_R1 = AnswerRule("search_r1", (extract.tag,), match_normalized)


@register_reward("search_r1", bounded=True, needs_ground_truth=True)
def search_r1(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Return 1.0 if the last `<answer>...</answer>` is an accepted answer, otherwise 0.0; with "acc" and "pred".

    The exact match of public verl for `searchR1_*` (Search-R1, Jin et al. 2025, arXiv:2503.09516): Natural Questions,
    HotpotQA and others.

    Args:
        ground_truth: {"target": [...]}, a list or a text.

    Raises:
        ValueError: If the ground truth is empty or no answer.
    """
    check = SEARCH_R1.check(solution_str, ground_truth)
    return {"score": float(check.correct), "acc": float(check.correct), "pred": check.answer.text or ""}
