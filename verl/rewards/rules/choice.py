"""Multiple choice: the answer is one letter, however it is said."""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules.accuracy import final_answer
from verl.rewards.rules.maths import last_boxed

_DEFAULT_COUNT = 10  # A to J, as many as the common test sets have
_GAP = r"[^A-Za-z\n]{0,6}"  # marks and spaces between words; bounded, so that no text takes long
_ALONE = r"(?<![A-Za-z'])(?P<letter>[A-Z])(?![A-Za-z'])"
# "the answer is (B)", "Answer: **B**", "I choose option B"
_CUE = re.compile(
    rf"(?i:\b(?:answer|choice|option|choose|pick|select){_GAP}(?:is|are|must be|would be)?{_GAP}"
    rf"(?:option|choice|answer|letter)?{_GAP}){_ALONE}"
)
# "(B)" anywhere; "B", "B." or "B) Paris" at the beginning of a line
_LISTED = re.compile(r"\(([A-Z])\)|^[ \t*_\"']{0,6}([A-Z])(?=[*_\"']{0,6}(?:[.):]|[ \t]{0,6}$))", re.MULTILINE)


@register_reward("multiple_choice", bounded=True)
def multiple_choice(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """1.0 where the chosen letter is the right one, else 0.0; with acc, and pred, the letter.

    ground_truth: a letter ("B", "(b)"), or the position of the right choice counted from 0. extra_info["choices"],
    where it is there: the texts of the choices; an answer that repeats one of them word for word chooses it.
    """
    choices = (extra_info or {}).get("choices")
    texts = [] if choices is None else list(choices)
    letter = extract_choice(solution_str, texts)
    right = float(letter == _reference(ground_truth, len(texts) or _DEFAULT_COUNT))
    return {"score": right, "acc": right, "pred": letter or ""}


def extract_choice(text: str, choices: Sequence[str] = ()) -> str | None:
    r"""The letter that a text settles on, or None.

    Looked for in `\boxed{}` or `<answer>`, then after the last "answer", "choose" or the like, then in the last "(B)"
    or line that begins with "B."; and last as the text of a choice.
    """
    letters = string.ascii_uppercase[: len(choices) or _DEFAULT_COUNT]
    boxed, said = last_boxed(text), final_answer(text)
    short = (boxed if boxed is not None else said).strip()
    bare = re.sub(r"\\text(?:bf)?|[^A-Za-z0-9 ]", "", short).strip()
    if len(bare) == 1 and bare.upper() in letters:
        return bare.upper()
    if boxed is not None or said != text:
        found = re.match(rf"[^A-Za-z]{{0,12}}(?:(?i:option|choice){_GAP})?{_ALONE}", short.replace("\\text", ""))
        if found and found["letter"] in letters:
            return found["letter"]
    for pattern in (_CUE, _LISTED):
        found = [next(filter(None, m.groups())) for m in pattern.finditer(text)]
        found = [letter for letter in found if letter in letters]
        if found:
            return found[-1]
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
            f"multiple_choice: the ground truth must be one of {letters[0]} to {letters[-1]} or a position from 0 to "
            f"{count - 1}, found {ground_truth!r}"
        )
    return letter
