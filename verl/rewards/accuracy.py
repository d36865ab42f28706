"""`accuracy_reward`: does the answer say what the reference says? For short answers, numbers or words."""

import re
from typing import Any

from verl.rewards import gsm8k
from verl.rewards.functions import register_reward

_SAID = re.compile(r"(?:answer\s*(?:is|:|=)|####)\s*:?", re.IGNORECASE)


@register_reward("accuracy_reward", bounded=True)
def accuracy_reward(sampled_response: str, reference_answer: Any) -> float:
    """1.0 where the final answer equals the reference, else 0.0.

    The final answer is what stands after the last `####`, "answer is" or "answer:", or else the whole response. A
    reference that is a number is compared as a number (1,000 is 1000.0) with the last number of the final answer; any
    other one as text, without regard to case, spaces around and closing punctuation. A reference with leading zeros
    ("007") is a text.
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
    """What stands after the last "answer is", "answer:" or "####", to the end of its line; else the whole text."""
    ends = [found.end() for found in _SAID.finditer(text)]
    return text[ends[-1] :].strip().partition("\n")[0] if ends else text


def _plain(text: str) -> str:
    """A text without what does not change an answer: case, runs of spaces, emphasis, closing punctuation."""
    return " ".join(text.casefold().split()).strip("*_`'\" ").rstrip(".!?,;: ")
