r"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): the final answer is one number and is compared as a number.

How a number is read:

- thousands may be grouped: `1,000`, `1 000` (also with no-break and thin spaces), `1{,}000`, `1\,000`, `1'000`,
  `1.234.567`, `12,34,567`; `12,34` and `12 100-dollar bills` are two numbers
- a currency sign may precede the number, with a minus before or after the sign: `-$5`, `$-5`, `\$5`
- a minus directly after a digit, a letter or a closing bracket is subtraction or a hyphen: `10-5` ends in 5
- `5.` is 5, `.5` is 0.5, `3/4` is three quarters, `1 1/2` is one and a half
- a number that goes on is no answer: `72 or 73`, `72-75`, `72 + 1`, `7:30`, `at least 72`; `72 = x` and `7:00 am` are
- units and words are ignored: `50%` is 50, `5 million` is 5
- a number of more than 120 characters is ignored, which bounds the time to score a response

Which number of free text is the final answer (`flexible`); the first match counts:

1. the number after `####`, the format of the dataset
2. the number in the last `\boxed{...}`, or after the last `<answer>`
3. the number after an announcement: `the answer is 72`, `**Answer:** 72 clips in 2 months`
4. in the last sentence with a number: the number after the last `=`, `≈` or `rounds to`; otherwise the bold number;
   otherwise the last number. `so` and `therefore` begin a sentence, `because` ends one: `it is 5 because 5 > 4`.
"""

import re
from fractions import Fraction
from numbers import Real
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules.answers.extract import last_match, visible_text
from verl.rewards.rules.answers.rule import read_references

_LONGEST = 120

_NUMBER_PATTERN = r"""
    (?<![0-9])(?<![0-9][.])                                   # not in the middle of another number
    (?: (?<![\w)\]}])(?P<minus>[-\u2212\u2013]) )?            # a sign, not a subtraction
    (?: \\?[$€£¥₹]\ ?(?P<inner_minus>[-\u2212])? )?
    (?:
        (?<!/) (?: (?P<whole>[0-9]+)\ )? (?P<top>[0-9]+)/(?P<bottom>[0-9]+) (?![/0-9]|[.][0-9])
    |   (?P<grouped>
            [1-9][0-9]{0,2} (?: (?:,|\{,\}|\\,|['\u00a0\u2009\u202f]) [0-9]{3} )+ (?![0-9])
        |   [1-9][0-9]? (?: ,[0-9]{2} )+ ,[0-9]{3} (?![0-9])  |  [1-9][0-9]{0,2} (?: [.][0-9]{3} ){2,} (?![.0-9])
        |   (?<![0-9]\ )(?<![0-9],\ ) [1-9][0-9]{0,2} (?:\ [0-9]{3})+ (?!\ ?[0-9]|[-/][0-9A-Za-z])
        )? (?P<digits>(?(grouped)|[0-9]+))? (?P<decimals>(?<![.])[.][0-9]+)?
        (?<=[0-9])                                            # at least one digit somewhere
        (?![.][0-9])                                          # 5.5.5 is no number
    )
"""
_NUMBER = re.compile(_NUMBER_PATTERN, re.VERBOSE)
# Emphasis and math delimiters that may follow "####".
_MARKS = re.compile(r"[ \t]*(?:\*\*?|__?|\\\(|\\\[|\$(?=\\)|\\boxed\{)*[ \t]*")

_SPACED_SIGN = re.compile(r"([-+\u2212]) ?(?=[$\\0-9.])")  # directly after "####"
_WIDE = str.maketrans("０１２３４５６７８９＃．，－", "0123456789#.,-")
# After a number: it is a part of a calculation, a range or a list. Before it: a bound or a denial.
_GOES_ON = re.compile(
    r"[*_$)}]{0,4}(?:\s*(?:(?!:00\s?[ap]\.?m)[-\u2013~,:]\s?\\?\$?[0-9]|[*/]\s?[0-9]|\\times|[+×÷^≤≥?]"
    r"|=(?!\s*[A-Za-z]\b)|[<>][\s=0-9]|\(?or\b(?! so)|(?:to|through)\s\$?[0-9]|and\s+(?:[0-9]|not))|e[0-9])"
)
_BOUND = re.compile(
    r"(?i:\bnot|n't|\bat (?:least|most)|(?:more|less|fewer) than|one of|between(?: .{1,20} and)?)\s[*$\\({]*$"
)
_TAIL = 1500  # characters at the end of a text that are searched
_BOXED = re.compile(r"\\boxed\{|<answer>")
_SAID = re.compile(r"\banswer\b[*_\\ ]*(?:is|would be|comes to|[:=])[*_:\s]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s)|\n|\b(?:so|thus|therefore|hence|meaning|which means)\b", re.IGNORECASE)
_RESULT = re.compile(r"[=≈]|\brounds? (?:up |down |off )?to\b")
_BOLD = re.compile(r"\*\*(?=[^*\n:]{0,80}\*\*(?!:))")  # not a heading, such as **Step 2:**
_REASON = re.compile(r"\bbecause\b")
_DIGIT = re.compile("[0-9]")


def extract(text: str, method: str = "strict") -> int | Fraction | None:
    """Return the final answer of a response, or None.

    Args:
        text: The response.
        method: "strict": the number directly after the last `####` that is followed by one, as in the dataset.
            "flexible": the number a reader would take for the final answer, by the rules of the module docstring.

    Raises:
        ValueError: For another method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: expected method 'strict' or 'flexible', found {method!r}")
    text = visible_text(text)
    text = text if text.isascii() else text.translate(_WIDE)
    match = _after_marks(text)
    if match is None and method == "flexible":
        match = _concluded(text[-_TAIL:])
    if match is None or _BOUND.search(match.string[: match.start()][-40:]) or _GOES_ON.match(match.string, match.end()):
        return None
    return _value(match)


def _after_marks(text: str) -> re.Match | None:
    # Only the last marks are tried, so that a response full of marks takes no longer than another.
    for rest in reversed(text.rsplit("####", 16)[1:]):
        rest = rest[_MARKS.match(rest).end() :]
        sign = _SPACED_SIGN.match(rest)
        rest = rest if sign is None else (sign[1] if sign[1] != "+" else "") + rest[sign.end() :]
        if match := _NUMBER.match(rest):
            return match
    return None


def _concluded(text: str) -> re.Match | None:
    """Find the final answer in a text without `####` (rules 2 to 4 of the module docstring)."""
    for mark in (_BOXED, _SAID):
        if last := last_match(mark, text):
            end = _SENTENCE_END.search(text, last.end())
            begin_and_end = (last.end(), end.start() if end else len(text))
            if match := _after_last(_RESULT, text, *begin_and_end) or _NUMBER.search(text, *begin_and_end):
                return match
    ends = [0, *(mark.end() for mark in _SENTENCE_END.finditer(text)), len(text)]
    for begin, end in zip(ends[-2::-1], ends[:0:-1]):
        if _DIGIT.search(text, begin, end):
            return _from_sentence(text, begin, end)
    return None


def _from_sentence(text: str, begin: int, end: int) -> re.Match | None:
    if match := _after_last(_RESULT, text, begin, end) or _after_last(_BOLD, text, begin, end):
        return match
    reason = _REASON.search(text, begin, end)
    if reason and _DIGIT.search(text, begin, reason.start()):
        end = reason.start()
    return last_match(_NUMBER, text, begin, end)


def _after_last(mark: re.Pattern, text: str, begin: int, end: int) -> re.Match | None:
    """Find the first number after the last match of `mark`."""
    last = last_match(mark, text, begin, end)
    return _NUMBER.search(text, last.end(), end) if last else None


def parse_number(value: Any) -> int | Fraction | None:
    """Return the value of a ground truth, given as a number or as text; None if it is not a number."""
    if isinstance(value, Real):
        value = str(value)
        return Fraction(value) if re.fullmatch(r"-?[0-9.]+(e[+-]?[0-9]+)?", value) else None
    match = _NUMBER.fullmatch(str(value).strip().removesuffix("."))
    return None if match is None else _value(match)


def _value(match: re.Match) -> int | Fraction | None:
    if match.end() - match.start() > _LONGEST:
        return None
    if match["top"] is not None:
        if int(match["bottom"]) == 0:
            return None
        value = Fraction(int(match["top"]), int(match["bottom"])) + int(match["whole"] or 0)
    else:
        value = int(re.sub("[^0-9]", "", match["grouped"] or match["digits"] or "0"))
        value += Fraction("0" + match["decimals"]) if match["decimals"] else 0
    return -value if match["minus"] or match["inner_minus"] else value


def _score(solution_str: str, ground_truth: Any, method: str, format_score: float) -> dict[str, Any]:
    texts = [text.rpartition("####")[2] for text in read_references(ground_truth, "gsm8k")]
    references = [parse_number(text) for text in texts]
    if None in references:
        raise ValueError(f"gsm8k: ground truth: expected a number, found {ground_truth!r}")
    answer = extract(solution_str, method)
    correct = answer in references
    score = 1.0 if correct else (0.0 if answer is None else format_score)
    return {"score": score, "acc": float(correct), "pred": "" if answer is None else str(answer)}


@register_reward("gsm8k", bounded=True, needs_ground_truth=True)
def gsm8k_strict(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, format_score: float = 0.0
) -> dict[str, Any]:
    """Return 1.0 if the number after `####` equals the ground truth, `format_score` for another number, otherwise 0.0.

    Returns:
        "score", "acc" (0 or 1) and "pred", the extracted number as text, which majority voting compares.
    """
    return _score(solution_str, ground_truth, "strict", format_score)


@register_reward("gsm8k_flexible", bounded=True, needs_ground_truth=True)
def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, format_score: float = 0.0
) -> dict[str, Any]:
    """Like `gsm8k`, with the final answer extracted from free text (see `extract`, method "flexible")."""
    return _score(solution_str, ground_truth, "flexible", format_score)
