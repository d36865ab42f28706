r"""Mathematics: is the final answer equivalent to the reference? By math-verify, with care for what answers can do.

The final answer is the content of the last `\boxed{...}` (braces may nest), or else whatever math-verify finds in the
last part of the text. Equivalent are 1/2, 0.5, \frac12 and 50\%; numbers with and without their unit; equal sets,
intervals, matrices and expressions. A reference in words ("Monday") is compared as words.

An answer can be built to take for ever (`9^{9^{9}}`, `10000000!`, a thousand brackets). math-verify's own time limits
are signals, which work in the main thread only and otherwise turn every score into 0; so they are off here. Whatever is
not seen at a glance to be harmless is compared in a process that can be killed, from whichever thread.
"""

import logging
import re
from functools import cache, lru_cache
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules.accuracy import final_answer
from verl.rewards.sandbox.pool import Call, Limits, address_of, shared_pool

logger = logging.getLogger(__name__)

_TAIL = 2000  # characters of an answer without a box that are looked at
_LONGEST = 1000  # characters of a boxed answer: a longer one is no answer
_LIMITS = Limits(wall_seconds=5.0, cpu_seconds=5.0, memory_bytes=1 << 30)

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\displaystyle|\\?\$")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
# A reference in words. math-verify takes letters for a product, for which "even" equals "neve"; up to three small
# letters may well be one.
_WORDS = re.compile(r"\(?(?:\\text(?:bf)?\{\(?[A-Za-z' -]+\)?\}|[A-Z]|[A-Za-z' -]{4,}|yes|Yes|no|No)\)?")
_INTEGER = re.compile(r"-?[0-9]{1,100}")
# Short, no power of a bracket or of a power, no factorial, no function, no equation to be solved.
_HARMLESS = re.compile(
    r"""(?:
        [0-9]{1,12}(?![0-9])
    |   [A-Za-z](?![A-Za-z])
    |   \\(?:frac|sqrt|pi|cdot|times|infty|cup|pm|circ|begin\{[pb]matrix\}|end\{[pb]matrix\})(?![A-Za-z])
    |   \\text\{[A-Za-z ]{0,40}\} | \\[%{}\\] | [-+*/.,:%()\[\]{}& ]
    |   (?<![)}\]])\^(?:[0-9](?![0-9^])|\{[0-9]\}(?!\^)|\{?\\circ\}?)
    ){1,120}""",
    re.VERBOSE,
)


@register_reward("math", bounded=True)
def math_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """1.0 where the final answer is equivalent to the ground truth, else 0.0; with acc, and pred, the final answer.

    A comparison that does not end within 5 s or needs more than 1 GiB gives 0.0 and a warning in the log. Raises
    ValueError for an empty ground truth.
    """
    answer, in_box = final_of(solution_str)
    right = float(_is_equivalent(solution_str, answer, in_box, ground_truth))
    return {"score": right, "acc": right, "pred": answer[:_LONGEST]}


def last_boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`, or None."""
    text, open_braces, last = text[-10 * _LONGEST :], [], None
    for mark in _BRACES.finditer(text):
        if mark["box"] or mark["open"]:
            open_braces.append(mark)
        elif mark["close"] and open_braces:
            opened = open_braces.pop()
            if opened["box"] and (last is None or opened.end() > last[0]):
                last = (opened.end(), mark.start())
    return None if last is None else text[slice(*last)]


def final_of(solution_str: str) -> tuple[str, bool]:
    """The final answer as it is compared, and whether it stood in a box; else it is what is said to be the answer."""
    boxed = last_boxed(solution_str)
    return _canonical(final_answer(solution_str[-_TAIL:]) if boxed is None else boxed), boxed is not None


def is_equivalent(solution_str: str, ground_truth: Any) -> bool:
    """Whether the final answer of a solution is mathematically the ground truth."""
    return _is_equivalent(solution_str, *final_of(solution_str), ground_truth)


def _is_equivalent(solution_str: str, answer: str, in_box: bool, ground_truth: Any) -> bool:
    if ground_truth is None or not str(ground_truth).strip():
        raise ValueError(f"math: the ground truth is empty: {ground_truth!r}")
    reference = _canonical(last_boxed(str(ground_truth)) or str(ground_truth))
    if answer == reference:
        return True
    if _WORDS.fullmatch(reference):
        return _words(reference) == _words(answer)
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(answer):
        return int(reference) == int(answer)
    if not in_box:
        return _verify_isolated(reference, solution_str[-_TAIL:])
    if len(answer) > _LONGEST:
        return False
    boxed = f"\\boxed{{{answer}}}"
    return _verify_here(reference, boxed) if _harmless(reference, answer) else _verify_isolated(reference, boxed)


def _canonical(text: str) -> str:
    """The same mathematics with fewer spellings: marks of layout dropped, one fraction command, plain digits."""
    text = _DROPPED.sub("", text.strip().removesuffix("."))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("**", "^").replace("{,}", ",")
    text = text.replace("\\varnothing", "\\emptyset").replace("\u2212", "-")
    text = re.sub(r"(?<=[0-9])(?:\\?[ \u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", "", text)
    if re.fullmatch(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?", text):
        text = text.replace(",", "")
    return " ".join(text.split())


def _words(text: str) -> str:
    r"""Words in one spelling: `\text{Monday}`, `(A)` and `monday` differ in looks only."""
    return " ".join(_TEXT.sub(r"\1", text).casefold().strip("() ").split())


def _harmless(reference: str, answer: str) -> bool:
    """Whether comparing the two is sure to take milliseconds. A guess to the safe side, at a glance."""
    return all(
        len(text) <= 120 and _HARMLESS.fullmatch(text) is not None and sum(map(text.count, "([{")) <= 12
        for text in (reference, answer)
    )


# The answers to one question are often the same; a hostile one that has come to be popular costs its time once.
@lru_cache(maxsize=4096)
def _verify_isolated(reference: str, answer: str) -> bool:
    """`_verify` in a process of its own. Over the limits: not equivalent, and a warning."""
    call = Call(address_of(_verify), {"reference": reference, "answer": answer})
    outcome = shared_pool().run(call, _LIMITS)
    if outcome.over_limit:
        logger.warning("math: comparing %.100r with %.100r %s; scored 0", answer, reference, outcome.failure)
        return False
    if outcome.failure is not None:
        raise RuntimeError(f"math: the comparison {outcome.failure}") from outcome.cause
    return outcome.value


def _verify(reference: str, answer: str) -> bool:
    """math-verify without its time limits; `answer` is a text with the answer somewhere in it."""
    from math_verify import verify

    parsed = _parse(answer)
    return bool(parsed) and verify(_parse(f"\\boxed{{{reference}}}"), parsed, timeout_seconds=None)


_verify_here = lru_cache(maxsize=4096)(_verify)


@lru_cache(maxsize=4096)
def _parse(text: str) -> list:
    return _parser()(text, parsing_timeout=None)


@cache
def _parser() -> Any:
    """math-verify's `parse`, after a proof that it works: with a wrong antlr it would find nothing in any answer."""
    from math_verify import parse

    # It warns once that its limits are off. They are, on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if not parse("\\boxed{\\frac{1}{2}}", parsing_timeout=None):
        raise RuntimeError("math-verify cannot read \\frac{1}{2}: pip install 'math-verify[antlr4_13_2]'")
    return parse
