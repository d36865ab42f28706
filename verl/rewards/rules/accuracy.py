"""`accuracy_reward`: compares the final answer of a response with a short reference, a number or words."""

import re
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules import gsm8k

_SAID = re.compile(r"(?:answer\s*(?:is|:|=)|####)\s*:?", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>\s*$", re.DOTALL | re.IGNORECASE)


@register_reward("accuracy_reward", bounded=True)
def accuracy_reward(sampled_response: str, reference_answer: Any) -> float:
    """Return 1.0 if the final answer (see `final_answer`) equals the reference, otherwise 0.0.

    A numeric reference is compared as a number (1,000 equals 1000.0) with the last number of the final answer. Any
    other reference is compared as text, ignoring case, surrounding whitespace and closing punctuation. A reference with
    leading zeros ("007") is text.

    Raises:
        ValueError: If the reference is empty.
    """
    if reference_answer is None or not str(reference_answer).strip():
        raise ValueError(f"accuracy_reward: the reference answer is empty: {reference_answer!r}")
    reference = str(reference_answer).strip()
    final = final_answer(sampled_response)
    if _plain(reference) in (_plain(final), _plain(sampled_response)):
        return 1.0
    number = None if re.match(r"-?0[0-9]", reference) else gsm8k.parse_number(reference)
    if number is None:
        return 0.0
    answer = gsm8k.extract(sampled_response, "strict")
    if answer is None:
        answer = gsm8k.extract(final, "flexible")
    return float(answer == number)


def final_answer(text: str) -> str:
    """Return the final answer stated in a text; the whole text if none is stated.

    The final answer is the content of `<answer>...</answer>` at the end, or what follows the last "answer is",
    "answer:" or "####" on the same line.
    """
    tagged = _TAGGED.search(text, max(0, text.rfind("<answer>")))
    if tagged:
        return tagged[1].strip()
    ends = [found.end() for found in _SAID.finditer(text)]
    return text[ends[-1] :].strip().partition("\n")[0] if ends else text


def _plain(text: str) -> str:
    """Normalize case, whitespace, emphasis and closing punctuation."""
    return " ".join(text.casefold().split()).strip("*_`'\" ").rstrip(".!?,;: ")
