r"""`accuracy_reward`: compares the final answer of a response with that of a short reference, a number or text.

The final answer of a text is the content of `<answer>...</answer>` at its end; otherwise of the last `\boxed{...}`, or
what follows the last "answer is", "answer:" or "####" on the same line, whichever comes later.
"""

import re
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules import gsm8k
from verl.utils.boxed import last_boxed

_SAID = re.compile(r"(?:answer\s*(?:is|:|=)|####)\s*:?", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>\s*$", re.DOTALL | re.IGNORECASE)
_UNIT = re.compile(r"([^\s%]+)(?:\s*%|\s+[^0-9]+)")
_TEXT = re.compile(r"\\text(?:bf)?\{([^{}]*)\}")


@register_reward("accuracy_reward", bounded=True, needs_ground_truth=True)
def accuracy_reward(sampled_response: str, reference_answer: Any) -> float:
    """Return 1.0 if the final answer of the response equals that of the reference, otherwise 0.0 (see `final_answer`).

    - A number is compared as a number: 1,000 equals 1000.0; there is no tolerance. If the response states no final
      answer, its last number counts: "I have 5 and 42 apples" matches the reference 42, but not 5.
    - A number with a unit ("42 apples") equals the number alone and the same text.
    - Other references are compared as text, ignoring case, surrounding whitespace, emphasis and closing punctuation. A
      number with leading zeros ("007") is text.

    Raises:
        ValueError: If the reference, or its final answer, is empty.
    """
    text = "" if reference_answer is None else str(reference_answer).strip()
    reference = final_answer(text).strip()
    if not _plain(reference):
        raise ValueError(f"accuracy_reward: the reference answer is empty: {reference_answer!r}")
    final = final_answer(sampled_response)
    if {_plain(text), _plain(reference)} & {_plain(final), _plain(sampled_response)}:
        return 1.0
    if re.match(r"-?0[0-9]", reference):
        return 0.0
    number = gsm8k.parse_number(_plain(reference))
    if number is None:
        unit = _UNIT.fullmatch(_plain(reference))
        number = gsm8k.parse_number(unit[1]) if unit else None
        return float(number is not None and gsm8k.parse_number(_plain(final)) == number)
    answer = gsm8k.extract(sampled_response, "strict")
    if answer is None:
        answer = gsm8k.extract(final, "flexible")
    return float(answer == number)


def final_answer(text: str) -> str:
    """Return the final answer stated in a text (see the module docstring); the whole text if none is stated."""
    tagged = _TAGGED.search(text, max(0, text.rfind("<answer>")))
    if tagged:
        return tagged[1].strip()
    begin = max((match.end() for match in _SAID.finditer(text)), default=0)
    boxed = last_boxed(text[begin:])
    if boxed is not None:
        return boxed
    return text[begin:].strip().partition("\n")[0] if begin else text


def _plain(text: str) -> str:
    """Normalize case, whitespace, emphasis, math delimiters and closing punctuation."""
    return " ".join(_TEXT.sub(r"\1", text).casefold().split()).strip("*_`'\"$ ").rstrip(".!?,;:*_`'\"$ ")
