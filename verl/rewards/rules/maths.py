r"""Mathematics: compare the final answer with the ground truth by mathematical equivalence, with math-verify.

The final answer is the content of the last `\boxed{...}` (braces may nest); without a box, what math-verify finds at
the end of the text. Equivalent are 1/2, 0.5, \frac12 and 50\%; numbers with and without units; equal sets, intervals,
matrices and expressions. A ground truth in words ("Monday") is compared as words.

A response can contain an expression that takes forever to evaluate (`9^{9^{9}}`, `10000000!`, a thousand brackets).
math-verify's own timeouts are signals, which work in the main thread only and otherwise turn every score into 0, so
they are disabled. Expressions that are not obviously cheap are compared in a process that can be killed, which works
from any thread.
"""

import logging
import re
from functools import cache, lru_cache
from typing import Any

from verl.rewards.functions import register_reward
from verl.rewards.rules.accuracy import final_answer
from verl.rewards.sandbox.pool import Call, Limits, address_of, shared_pool
from verl.utils.boxed import last_boxed

logger = logging.getLogger(__name__)

_TAIL = 2000  # characters at the end of a response without a box that are searched
_LONGEST = 1000  # characters of a boxed answer; longer ones are wrong
_LIMITS = Limits(wall_seconds=5.0, cpu_seconds=5.0, memory_bytes=1 << 30)

_LAYOUT = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\displaystyle|\\?\$")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
# A ground truth in words. math-verify reads letters as a product of variables, so that "even" equals "neve". Up to
# three lower-case letters may be such a product.
_WORDS = re.compile(r"\(?(?:\\text(?:bf)?\{\(?[A-Za-z' -]+\)?\}|[A-Z]|[A-Za-z' -]{4,}|yes|Yes|no|No)\)?")
_INTEGER = re.compile(r"-?[0-9]{1,100}")
# Short; no power of a bracket or of a power, no factorial, no function, no equation to solve.
_CHEAP = re.compile(
    r"""(?:
        [0-9]{1,12}(?![0-9])
    |   [A-Za-z](?![A-Za-z])
    |   \\(?:frac|sqrt|pi|cdot|times|infty|cup|pm|circ|begin\{[pb]matrix\}|end\{[pb]matrix\})(?![A-Za-z])
    |   \\text\{[A-Za-z ]{0,40}\} | \\[%{}\\] | [-+*/.,:%()\[\]{}& ]
    |   (?<![)}\]])\^(?:[0-9](?![0-9^])|\{[0-9]\}(?!\^)|\{?\\circ\}?)
    ){1,120}""",
    re.VERBOSE,
)


@register_reward("math", bounded=True, needs_ground_truth=True)
def math_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Return 1.0 if the final answer is equivalent to the ground truth, otherwise 0.0; with "acc" and "pred".

    A comparison that takes more than 5 s or 1 GiB scores 0.0 and logs a warning.

    Raises:
        ValueError: If the ground truth is empty.
    """
    answer, in_box = extract_final(solution_str)
    correct = float(_is_equivalent(solution_str, answer, in_box, ground_truth))
    return {"score": correct, "acc": correct, "pred": answer[:_LONGEST]}


@register_reward("math_dapo", bounded=True, needs_ground_truth=True)
def math_dapo(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Return 1.0 if the final answer is equivalent to the ground truth, otherwise -1.0; "acc" is 1.0 or 0.0.

    The reward of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.1). The answers are compared as in `math`.
    """
    result = math_reward(data_source, solution_str, ground_truth)
    return {**result, "score": 2.0 * result["acc"] - 1.0}


def extract_final(solution_str: str) -> tuple[str, bool]:
    """Return the normalized final answer, and whether it was in a box. Without a box, see `final_answer`."""
    boxed = last_boxed(solution_str)
    return _canonical(final_answer(solution_str[-_TAIL:]) if boxed is None else boxed), boxed is not None


def is_equivalent(solution_str: str, ground_truth: Any) -> bool:
    """Whether the final answer of a response is mathematically equivalent to the ground truth."""
    return _is_equivalent(solution_str, *extract_final(solution_str), ground_truth)


def _is_equivalent(solution_str: str, answer: str, in_box: bool, ground_truth: Any) -> bool:
    if ground_truth is None or not str(ground_truth).strip():
        raise ValueError(f"math: ground truth: expected a non-empty text, found {ground_truth!r}")
    reference = _canonical(last_boxed(str(ground_truth)) or str(ground_truth))
    if answer == reference:
        return True
    if _WORDS.fullmatch(reference):
        return _normalize_words(reference) == _normalize_words(answer)
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(answer):
        return int(reference) == int(answer)
    if not in_box:
        return _verify_isolated(reference, solution_str[-_TAIL:])
    if len(answer) > _LONGEST:
        return False
    boxed = f"\\boxed{{{answer}}}"
    return _verify_in_process(reference, boxed) if _is_cheap(reference, answer) else _verify_isolated(reference, boxed)


def _canonical(text: str) -> str:
    """Normalize LaTeX: drop layout commands, use one fraction command and plain digits."""
    text = _LAYOUT.sub("", text.strip().removesuffix("."))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("**", "^").replace("{,}", ",")
    text = text.replace("\\varnothing", "\\emptyset").replace("\u2212", "-")
    text = re.sub(r"(?<=[0-9])(?:\\?[ \u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", "", text)
    if re.fullmatch(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?", text):
        text = text.replace(",", "")
    return " ".join(text.split())


def _normalize_words(text: str) -> str:
    r"""Normalize words: `\text{Monday}` and `(Monday)` become `monday`."""
    return " ".join(_TEXT.sub(r"\1", text).casefold().strip("() ").split())


def _is_cheap(reference: str, answer: str) -> bool:
    """Whether the comparison certainly takes only milliseconds. Conservative."""
    return all(
        len(text) <= 120 and _CHEAP.fullmatch(text) is not None and sum(map(text.count, "([{")) <= 12
        for text in (reference, answer)
    )


# Responses to one prompt often share their final answer, so an expensive one is compared only once.
@lru_cache(maxsize=4096)
def _verify_isolated(reference: str, answer: str) -> bool:
    """Run `_verify` in a subprocess. Over its limits: not equivalent, with a warning."""
    call = Call(address_of(_verify), {"reference": reference, "answer": answer})
    outcome = shared_pool().run(call, _LIMITS)
    if outcome.over_limit:
        logger.warning("math: comparing %.100r with %.100r %s; scored 0", answer, reference, outcome.failure)
        return False
    if outcome.failure is not None:
        raise RuntimeError(f"math: the comparison {outcome.failure}") from outcome.cause
    return outcome.value


def _verify(reference: str, answer: str) -> bool:
    """Run math-verify without its timeouts; `answer` is a text that contains the final answer."""
    from math_verify import verify

    parsed = _parse(answer)
    return bool(parsed) and verify(_parse(f"\\boxed{{{reference}}}"), parsed, timeout_seconds=None)


_verify_in_process = lru_cache(maxsize=4096)(_verify)


@lru_cache(maxsize=4096)
def _parse(text: str) -> list:
    return _parser()(text, parsing_timeout=None)


@cache
def _parser() -> Any:
    """Return math-verify's `parse` after a check that it works: with the wrong antlr version it finds nothing."""
    from math_verify import parse

    # It warns once that its timeouts are disabled, which is intended here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if not parse("\\boxed{\\frac{1}{2}}", parsing_timeout=None):
        raise RuntimeError("math-verify cannot parse \\frac{1}{2}: pip install 'math-verify[antlr4_13_2]'")
    return parse
