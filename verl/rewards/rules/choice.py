"""Multiple choice: extract the chosen letter from a response and compare it with the ground truth."""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules.answers import extract
from verl.rewards.rules.answers.rule import read_references
from verl.utils.choices import read_choices

_DEFAULT_COUNT = 10  # A to J, the maximum of common benchmarks
_MARKS = r"[^A-Za-z\n]{0,6}"  # between words; bounded, so that matching time stays linear
_ALONE = r"(?<![A-Za-z'])(?P<letter>[A-Z])(?![A-Za-z'])"
# Two letters for one choice: "A or B", "A and B", "A/B".
_SECOND = re.compile(rf"{_MARKS}(?:\b(?:or|and|maybe)\b|/){_MARKS}(?:(?i:option|choice){_MARKS})?[A-Z](?![A-Za-z'])")
# "the answer is (B)", "Answer: **B**", "I choose option B", "not A but C"
_CUE = re.compile(
    rf"(?i:\b(?:answer|choice|option|choose|pick|select|go with|it){_MARKS}(?:is|are|(?:must|would|should) be)?{_MARKS}"
    rf"(?:not\b.{{1,40}}?\bbut{_MARKS})?(?:therefore|thus|clearly)?{_MARKS}"
    rf"(?:option|choice|answer|letter|the|best|correct){{0,3}}{_MARKS}){_ALONE}"
)
# "C is the answer", "option C is right"
_PRAISED = re.compile(
    rf"{_ALONE}[).]?{_MARKS}(?:is|must be|would be)\s+(?:the\s+)?(?:(?:only|best|most)\s+)?"
    r"(?:correct|right|true|answer|(?:one|choice|option)\b)"
)
# "(B)" anywhere; "B", "B." or "B) Paris" at the beginning of a line
_LISTED = re.compile(r"\(([A-Z])\)|^[ \t*_\"']{0,6}([A-Z])(?=[*_\"']{0,6}(?:[.):]|[ \t]{0,6}$))", re.MULTILINE)
_CHINESE = re.compile(r"(?:选择?|答案[是为]?)[:：]?\s*(?P<letter>[A-Z])(?![A-Za-z])")
_SENTENCE_END = re.compile(r"[.!?;](?=\s|$)|\n")
_DENIAL = re.compile(
    r"\b(?:not|incorrect|wrong|false|eliminate[sd]?|ruled?(?: it)? out|excluded?|except|never|but)\b|n't\b",
    re.IGNORECASE,
)
_I_DO = re.compile(r"\s*(?:do|don'?t|am|can|cannot|have|think|know|believe|would|will|was)\b")


@register_reward("multiple_choice", bounded=True, needs_ground_truth=True)
def multiple_choice(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return 1.0 if the chosen letter is correct, otherwise 0.0; with "acc" and "pred", the letter.

    Args:
        ground_truth: A letter ("B", "(b)"), the index of the correct choice counted from 0 (2 or "2"), the text of the
            choice, or one of its labels.
        extra_info: May contain "choices" or "options" (see `read_choices`). A final answer that equals a text or a
            label selects it.

    Raises:
        ValueError: If the ground truth is not one of the choices.
    """
    choices = read_choices(extra_info or {})
    texts, labels = [*choices.values()], [*choices]
    letter = extract_choice(solution_str, texts, labels)
    accepted = [ground_truth] if isinstance(ground_truth, int) else read_references(ground_truth, "multiple_choice")
    right = float(letter in [_reference(reference, texts, labels) for reference in accepted])
    return {"score": right, "acc": right, "pred": letter or ""}


def extract_choice(text: str, choices: Sequence[str] = (), labels: Sequence[str] = ()) -> str | None:
    r"""Return the letter that a text chooses, or None. Two letters ("A or B") are no choice.

    Searched in this order: inside `\boxed{}` or `<answer>`, or after "answer is"; after the last "answer", "choose" or
    similar; "C is the answer"; the last "(B)" or line that begins with "B."; the text of a choice.
    """
    letters = string.ascii_uppercase[: len(choices) or _DEFAULT_COUNT]
    text = extract.visible_text(text)
    answer = extract.box(text) or extract.tag(text) or extract.statement(text)
    if answer is not None and answer.text is None:
        return None
    short = (text if answer is None else answer.text).strip()
    if answer is not None or len(short) < 80:
        if short in labels:
            return letters[list(labels).index(short)]
        letter = _leading_letter(short, letters)
        if letter is not None:
            return letter or None
        if (letter := _by_text(short, choices)) is not None:
            return letter
    if answer is not None and answer.source in ("box", "<answer>"):
        return None
    for pattern in (_CUE, _PRAISED, _CHINESE):
        matches = [match for match in _mentions(pattern, text, letters) if not _is_denied(text, match)]
        if matches:
            return None if _SECOND.match(text, matches[-1].end("letter")) else matches[-1]["letter"]
    listed = "".join(match[match.lastindex] for match in _mentions(_LISTED, text, letters))
    is_enumeration = len(listed) > 1 and letters.startswith(listed)
    return None if is_enumeration or not listed else listed[-1]


def _mentions(pattern: re.Pattern, text: str, letters: str) -> list[re.Match]:
    """The matches with one of the letters, without the pronoun I."""
    matches = (match for match in pattern.finditer(text) if match[match.lastindex] in letters)
    return [match for match in matches if not (match[0].endswith("I") and _I_DO.match(text, match.end()))]


def _is_denied(text: str, match: re.Match) -> bool:
    """Whether the sentence of a match denies its choice, or asks."""
    begin = max(text.rfind(mark, 0, match.start()) for mark in (". ", "! ", "? ", "; ", "\n")) + 1
    end = _SENTENCE_END.search(text, match.end("letter"))
    sentence = text[begin : end.end() if end else len(text)]
    sentence = re.sub(r"\bnot\b.{1,40}?\bbut\b|[,(;]\s*not\b.*", " ", sentence, flags=re.DOTALL)
    return sentence.rstrip().endswith("?") or _DENIAL.search(sentence) is not None


def _leading_letter(short: str, letters: str) -> str | None:
    """The letter with which a short answer begins; "" if it names two, denies or asks; None without one."""
    bare = re.sub(r"\\(?:textbf|textit|text|mathrm|mathbf)(?![a-z])|[*_`$\\{}\"]", "", short).strip()
    if re.fullmatch(r"\W*[A-Za-z]\W*", bare):
        letter = re.sub(r"\W", "", bare).upper()
        return letter if letter in letters else None
    match = re.match(rf"\(?(?:(?i:option|choice|answer|letter){_MARKS})?\(?{_ALONE}", bare)
    if match is None or match["letter"] not in letters:
        return None
    rest = re.sub(r"\b(?:because|since)\b(?!.*\b(?:no|wait|actually)\b).*", "", bare[match.end() :], flags=re.DOTALL)
    if match["letter"] in "AI" and re.match(r"\s+[a-z]", rest):  # "A dog", "I don't know"
        return None
    others = set(re.findall(rf"(?<![A-Za-z'])[{letters}](?![A-Za-z'])(?!\s+[a-z])", rest)) - {"I", match["letter"]}
    is_open = others or _DENIAL.search(rest) or bare.rstrip().endswith("?") or "? " in bare
    return "" if is_open else match["letter"]


def _by_text(answer: str, choices: Sequence[str]) -> str | None:
    same = [i for i, choice in enumerate(choices) if _plain(choice) == _plain(answer)]
    return string.ascii_uppercase[same[0]] if len(same) == 1 else None


def _plain(text: str) -> str:
    return " ".join(str(text).casefold().split()).strip(" .\"'*")


def _reference(ground_truth: Any, texts: Sequence[str], labels: Sequence[str]) -> str:
    count = len(texts) or _DEFAULT_COUNT
    letters = string.ascii_uppercase[:count]
    text = str(ground_truth).strip()
    if text in labels:
        return letters[list(labels).index(text)]
    letter = text.strip("().").upper()
    if len(letter) == 1 and letter in letters:
        return letter
    if (by_text := _by_text(text, texts)) is not None:
        return by_text
    if not isinstance(ground_truth, bool) and text.isdecimal() and int(text) < count:
        return letters[int(text)]
    raise ValueError(
        f"multiple_choice: ground truth: expected one of {letters[0]} to {letters[-1]}, an index from 0 to "
        f"{count - 1} or the text of a choice, found {ground_truth!r}"
    )
