"""`accuracy_reward`: does the answer say what the reference says? For short answers, numbers or words."""

import re
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules import gsm8k

_SAID = re.compile(r"(?:answer\s*(?:is|:|=)|####)\s*:?", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>\s*$", re.DOTALL | re.IGNORECASE)


@register_reward("accuracy_reward", bounded=True)
def accuracy_reward(sampled_response: str, reference_answer: Any) -> float:
    """1.0 where the final answer (see `final_answer`) equals the reference, else 0.0.

    A reference that is a number is compared as a number (1,000 is 1000.0) with the last number of the final answer; any
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
    """What the text says to be its answer, else the whole text.

    That is what `<answer>...</answer>` at the end holds, or what follows the last "answer is", "answer:" or "####" up
    to the end of its line.
    """
    tagged = _TAGGED.search(text, max(0, text.rfind("<answer>")))
    if tagged:
        return tagged[1].strip()
    ends = [found.end() for found in _SAID.finditer(text)]
    return text[ends[-1] :].strip().partition("\n")[0] if ends else text


def _plain(text: str) -> str:
    """A text without what does not change an answer: case, runs of spaces, emphasis, closing punctuation."""
    return " ".join(text.casefold().split()).strip("*_`'\" ").rstrip(".!?,;: ")
