"""Multiple choice: extract the chosen letter from a response and compare it with the ground truth."""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules.accuracy import final_answer
from verl.utils.boxed import last_boxed

_DEFAULT_COUNT = 10  # A to J, the maximum of common benchmarks
_MARKS = r"[^A-Za-z\n]{0,6}"  # between words; bounded, so that matching time stays linear
_ALONE = r"(?<![A-Za-z'])(?P<letter>[A-Z])(?![A-Za-z'])"
# "the answer is (B)", "Answer: **B**", "I choose option B"
_CUE = re.compile(
    rf"(?i:\b(?:answer|choice|option|choose|pick|select){_MARKS}(?:is|are|must be|would be)?{_MARKS}"
    rf"(?:option|choice|answer|letter)?{_MARKS}){_ALONE}"
)
# "(B)" anywhere; "B", "B." or "B) Paris" at the beginning of a line
_LISTED = re.compile(r"\(([A-Z])\)|^[ \t*_\"']{0,6}([A-Z])(?=[*_\"']{0,6}(?:[.):]|[ \t]{0,6}$))", re.MULTILINE)


@register_reward("multiple_choice", bounded=True, needs_ground_truth=True)
def multiple_choice(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return 1.0 if the chosen letter is correct, otherwise 0.0; with "acc" and "pred", the letter.

    Args:
        ground_truth: A letter ("B", "(b)") or the index of the correct choice, counted from 0.
        extra_info: May contain "choices", the texts of the choices. A final answer that equals one of them selects it.

    Raises:
        ValueError: If the ground truth is not one of the choices.
    """
    choices = (extra_info or {}).get("choices")
    texts = [] if choices is None else list(choices)
    letter = extract_choice(solution_str, texts)
    right = float(letter == _reference(ground_truth, len(texts) or _DEFAULT_COUNT))
    return {"score": right, "acc": right, "pred": letter or ""}


def extract_choice(text: str, choices: Sequence[str] = ()) -> str | None:
    r"""Return the letter that a text chooses, or None.

    Searched in this order: inside `\boxed{}` or `<answer>`; after the last "answer", "choose" or similar; the last
    "(B)" or line that begins with "B."; the text of a choice.
    """
    letters = string.ascii_uppercase[: len(choices) or _DEFAULT_COUNT]
    boxed, stated = last_boxed(text), final_answer(text)
    short = (boxed if boxed is not None else stated).strip()
    bare = re.sub(r"\\text(?:bf)?|[^A-Za-z0-9 ]", "", short).strip()
    if len(bare) == 1 and bare.upper() in letters:
        return bare.upper()
    if boxed is not None or stated != text:
        match = re.match(rf"[^A-Za-z]{{0,12}}(?:(?i:option|choice){_MARKS})?{_ALONE}", short.replace("\\text", ""))
        if match and match["letter"] in letters:
            return match["letter"]
    for pattern in (_CUE, _LISTED):
        matches = [next(filter(None, match.groups())) for match in pattern.finditer(text)]
        matches = [letter for letter in matches if letter in letters]
        if matches:
            return matches[-1]
    return _by_text(short, choices)


def _by_text(answer: str, choices: Sequence[str]) -> str | None:
    plain = [" ".join(str(c).casefold().split()).rstrip(".") for c in choices]
    same = [i for i, choice in enumerate(plain) if choice == " ".join(answer.casefold().split()).rstrip(".")]
    return string.ascii_uppercase[same[0]] if len(same) == 1 else None


def _reference(ground_truth: Any, count: int) -> str:
    letters = string.ascii_uppercase[:count]
    if isinstance(ground_truth, int) and not isinstance(ground_truth, bool) and 0 <= ground_truth < count:
        return letters[ground_truth]
    letter = str(ground_truth).strip().strip("().").upper()
    if len(letter) != 1 or letter not in letters:
        raise ValueError(
            f"multiple_choice: ground truth: expected one of {letters[0]} to {letters[-1]} or an index from 0 to "
            f"{count - 1}, found {ground_truth!r}"
        )
    return letter
