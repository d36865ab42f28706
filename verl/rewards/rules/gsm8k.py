r"""Grade-school mathematics (GSM8K, Cobbe et al. 2021, arXiv:2110.14168): the answer is one number, compared as such.

How a number is read:

- thousands may be grouped: `1,000`, `1 000` (also by no-break and thin spaces), `1{,}000`, `1\,000`; a group of other
  than three digits is no group (`12,34` is two numbers), and `12 100-dollar bills` are two numbers
- a currency sign may stand before it, a minus before or after that: `-$5`, `$-5`, `\$5`
- a minus right after a digit, a letter or a closing bracket is subtraction or a hyphen: `10-5` ends in 5
- `5.` is 5, `.5` is 0.5, `3/4` is three quarters, `1 1/2` is one and a half
- units and words are not read: `50%` is 50, `5 million` is 5
- a number of more than 120 characters is no answer: the time to score a row does not depend on who wrote it

Which number of a free text is its answer (`flexible`), the first of these that is there:

1. the one after `####`, the form of the data set
2. the one in the last `\boxed{...}`, or after the last `<answer>`
3. what the text says to be its answer: `the answer is 72`, `**Answer:** 72 clips in 2 months`
4. of the last sentence with a number: the one after its last `=`, `≈` or `rounds to`; else the bold one; else its last
   one. `so` and `therefore` begin a sentence, `because` ends one: `it is 5 because 5 > 4`.
"""

import re
from fractions import Fraction
from numbers import Real
from typing import Any

from verl.rewards.functions import register_reward

_LONGEST = 120

_NUMBER_PATTERN = r"""
    (?<![0-9])(?<![0-9][.])                                   # not from the middle of another number
    (?: (?<![\w)\]}])(?P<minus>[-\u2212\u2013]) )?            # a sign, not a subtraction
    (?: \\?[$€£¥₹]\ ?(?P<inner_minus>[-\u2212])? )?
    (?:
        (?<!/) (?: (?P<whole>[0-9]+)\ )? (?P<top>[0-9]+)/(?P<bottom>[0-9]+) (?![/0-9]|[.][0-9])
    |   (?P<grouped>
            [1-9][0-9]{0,2} (?: (?:,|\{,\}|\\,|[\u00a0\u2009\u202f]) [0-9]{3} )+ (?![0-9])
        |   (?<![0-9]\ )(?<![0-9],\ ) [1-9][0-9]{0,2} (?:\ [0-9]{3})+ (?!\ ?[0-9]|[-/][0-9A-Za-z])
        )? (?P<digits>(?(grouped)|[0-9]+))? (?P<decimals>(?<![.])[.][0-9]+)?
        (?<=[0-9])                                            # at least one digit somewhere
    )
"""
_NUMBER = re.compile(_NUMBER_PATTERN, re.VERBOSE)
# After "####": emphasis and mathematics marks may come first.
_MARKS = re.compile(r"[ \t]*(?:\*\*|__|\\\(|\\\[|\$(?=\\)|\\boxed\{)*[ \t]*")

_TAIL = 1500  # characters at the end of a text in which its answer is looked for
_BOXED = re.compile(r"\\boxed\{|<answer>")
_SAID = re.compile(r"\banswer\b[*_\\ ]*(?:is|would be|comes to|[:=])[*_:\s]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s)|\n|\b(?:so|thus|therefore|hence|meaning|which means)\b", re.IGNORECASE)
_RESULT = re.compile(r"[=≈]|\brounds? (?:up |down |off )?to\b")
_BOLD = re.compile(r"\*\*(?=[^*\n:]{0,80}\*\*(?!:))")  # no heading, such as **Step 2:**
_REASON = re.compile(r"\bbecause\b")
_DIGIT = re.compile("[0-9]")


def extract(text: str, method: str = "strict") -> int | Fraction | None:
    """The final answer of a solution, or None where there is none.

    strict: the number right after the last `####` that has one (the form of the data set's own answers).
    flexible: the number that a reader takes for the answer, by the rules at the top of this file.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: expected method 'strict' or 'flexible', found {method!r}")
    found = _after_marks(text)
    if found is None and method == "flexible":
        found = _concluded(text[-_TAIL:])
    return None if found is None else _value(found)


def _after_marks(text: str) -> re.Match | None:
    # The last few marks only: an answer that is all marks must not cost more than another.
    for piece in reversed(text.rsplit("####", 16)[1:]):
        found = _NUMBER.match(piece, _MARKS.match(piece).end())
        if found:
            return found
    return None


def _concluded(text: str) -> re.Match | None:
    """The number that a text without `####` ends in, as a reader understands it."""
    for mark in (_BOXED, _SAID):
        if marks := list(mark.finditer(text)):
            begin = marks[-1].end()
            end = _SENTENCE_END.search(text, begin)
            begin_and_end = (begin, end.start() if end else len(text))
            found = _after_last(_RESULT, text, *begin_and_end) or _NUMBER.search(text, *begin_and_end)
            if found:
                return found
    ends = [0, *(mark.end() for mark in _SENTENCE_END.finditer(text)), len(text)]
    for begin, end in zip(ends[-2::-1], ends[:0:-1]):
        if _DIGIT.search(text, begin, end):
            return _of_sentence(text, begin, end)
    return None


def _of_sentence(text: str, begin: int, end: int) -> re.Match | None:
    if found := _after_last(_RESULT, text, begin, end) or _after_last(_BOLD, text, begin, end):
        return found
    reason = _REASON.search(text, begin, end)
    if reason and _DIGIT.search(text, begin, reason.start()):
        end = reason.start()
    numbers = list(_NUMBER.finditer(text, begin, end))
    return numbers[-1] if numbers else None


def _after_last(mark: re.Pattern, text: str, begin: int, end: int) -> re.Match | None:
    """The first number after the last such mark, where there is one."""
    marks = list(mark.finditer(text, begin, end))
    return _NUMBER.search(text, marks[-1].end(), end) if marks else None


def parse_number(value: Any) -> int | Fraction | None:
    """The number that a reference answer (a number, or a text that is one) stands for; None where it is not one."""
    if isinstance(value, Real):
        value = str(value)
        return Fraction(value) if re.fullmatch(r"-?[0-9.]+(e[+-]?[0-9]+)?", value) else None
    found = _NUMBER.fullmatch(str(value).strip().removesuffix("."))
    return None if found is None else _value(found)


def _value(found: re.Match) -> int | Fraction | None:
    if found.end() - found.start() > _LONGEST:
        return None
    whole, top, bottom, grouped, digits, decimals = found.group(
        "whole", "top", "bottom", "grouped", "digits", "decimals"
    )
    if top is not None:
        if int(bottom) == 0:
            return None
        value = Fraction(int(top), int(bottom)) + (int(whole) if whole else 0)
    else:
        integer = int(re.sub("[^0-9]", "", grouped) if grouped else digits or 0)
        value = integer + Fraction(int(decimals[1:]), 10 ** (len(decimals) - 1)) if decimals else integer
    return -value if found["minus"] or found["inner_minus"] else value


def _score(solution_str: str, ground_truth: Any, method: str, format_score: float) -> dict[str, Any]:
    text = ground_truth.rpartition("####")[2] if isinstance(ground_truth, str) else ground_truth
    reference = parse_number(text)
    if reference is None:
        raise ValueError(f"gsm8k: the ground truth must be a number, found {ground_truth!r}")
    answer = extract(solution_str, method)
    right = answer == reference
    score = 1.0 if right else (0.0 if answer is None else format_score)
    return {"score": score, "acc": float(right), "pred": "" if answer is None else str(answer)}


@register_reward("gsm8k", bounded=True)
def gsm8k_strict(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, format_score: float = 0.0
) -> dict[str, Any]:
    """1.0 where the number after `####` equals the ground truth; `format_score` for another number; else 0.0.

    Returns score, acc (0 or 1) and pred, the number found as a text: what votes are counted by.
    """
    return _score(solution_str, ground_truth, "strict", format_score)


@register_reward("gsm8k_flexible", bounded=True)
def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, format_score: float = 0.0
) -> dict[str, Any]:
    """The same by the number that a reader takes for the answer, wherever it stands."""
    return _score(solution_str, ground_truth, "flexible", format_score)
