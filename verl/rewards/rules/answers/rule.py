r"""The answer layer of the rules: extract the final answer, read the ground truth, compare.

A rule is an `AnswerRule`: the extractors that it tries in order, and how it compares. `math_reward`, `math_dapo`,
`accuracy_reward`, ... are such rules with the scores of their data sources.

    >>> rule = AnswerRule("math", (extract.box,))
    >>> rule.check(r"So $x = \boxed{\frac{1}{2}}$.", "0.5")
    Check(correct=True, answer=Answer(text='\\frac{1}{2}', source='box'))

A response can contain an expression that takes forever to evaluate (`9^{9^{9}}`, `10000000!`, a thousand brackets).
Expressions that are not obviously cheap are compared in a process with limits, which works from any thread.
"""

import ast
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from numbers import Number
from typing import Any

from verl.rewards.rules.answers import compare, extract
from verl.rewards.rules.answers.extract import Answer
from verl.rewards.sandbox.pool import Call, Limits, address_of, shared_pool
from verl.utils.boxed import find_boxes

logger = logging.getLogger(__name__)

# The limit is CPU time: on a busy machine a comparison may wait. The elapsed time only ends a comparison that hangs.
_LIMITS = Limits(wall_seconds=120.0, cpu_seconds=5.0, memory_bytes=1 << 30)
_REFERENCE_KEYS = ("target", "ground_truth", "answer", "answers", "final_answer", "value")
# Short; no power of a bracket or of a power, no factorial, no function, no equation to solve.
_CHEAP = re.compile(
    r"""(?:
        [0-9]{1,12}(?![0-9])
    |   [A-Za-z](?![A-Za-z])
    |   \\(?:d?frac|sqrt|pi|cdot|times|infty|cup|pm|circ|left|right|begin\{[pb]matrix\}|end\{[pb]matrix\})(?![A-Za-z])
    |   \\text(?:bf)?\{[A-Za-z .]{0,40}\} | \\[%{}$!,;\s] | [-+*/.,:%()\[\]{}&$£€° ]
    |   (?<![)}\]])\^(?:[0-9](?![0-9^])|\{[0-9]\}(?!\^)|\{?\\circ\}?)
    ){1,120}""",
    re.VERBOSE,
)
_ENCODED = re.compile(r"[\[{]\s*[\"'\[]")
_DECIMAL = re.compile(r"[-+]?[0-9]{1,30}(?:\.[0-9]{1,30})?")
# A number or words, which are compared without the parser.
_PLAIN = re.compile(r"[-+]?\$?[0-9][0-9,]{0,20}(?:\.[0-9]{1,20})?%?|[A-Za-z][A-Za-z' -]{0,80}")


@dataclass(frozen=True)
class Check:
    """The result of a rule: whether the answer is correct, and the answer that was compared."""

    correct: bool
    answer: Answer


@dataclass(frozen=True)
class AnswerRule:
    """How a data source states and compares answers."""

    name: str  # the name of the rule in errors
    # tried in order on the response without its thoughts; the first that returns an answer decides
    extractors: tuple[Callable[[str], Answer | None], ...]
    # compares (answer, reference); default `is_equal`
    equal: Callable[[str, str], bool] = field(default=lambda answer, reference: is_equal(answer, reference))

    def extract(self, response: str) -> Answer:
        """Return the final answer of a response. Its text is None if there is none."""
        text = extract.visible_text(response)
        if not text.strip() and response.strip():
            return Answer(None, "the response is a thought that does not end, or nothing follows it")
        extracted = (extractor(text) for extractor in self.extractors)
        return next((answer for answer in extracted if answer is not None), Answer(None, "no final answer is stated"))

    def check(self, response: str, ground_truth: Any) -> Check:
        """Compare the final answer of a response with the ground truth. Raises ValueError for a bad ground truth."""
        references = read_references(ground_truth, self.name)
        answer = self.extract(response)
        correct = answer.text is not None and any(self.equal(answer.text, reference) for reference in references)
        return Check(correct, answer)


def read_references(ground_truth: Any, rule: str) -> list[str]:
    """Return the accepted answers of a ground truth: text, a number, a list (any of), a mapping, or JSON text of these.

    Raises:
        ValueError: If it is empty, or of another type.
    """
    references: list[str] = []
    if isinstance(ground_truth, str):
        if (decoded := _decode(ground_truth.strip())) is not None:
            return read_references(decoded, rule)
        boxes = find_boxes(ground_truth)
        references = [((boxes[-1][0] or "") if boxes else ground_truth).strip()]
    elif hasattr(ground_truth, "tolist"):
        return read_references(ground_truth.tolist(), rule)
    elif isinstance(ground_truth, Mapping):
        elements = [ground_truth[key] for key in _REFERENCE_KEYS if key in ground_truth][:1]
        references = [text for element in elements for text in read_references(element, rule)]
    elif isinstance(ground_truth, (list, tuple)):
        references = [text for element in ground_truth for text in read_references(element, rule)]
    elif isinstance(ground_truth, (Number, Decimal)) and ground_truth == ground_truth:  # not NaN, a missing value
        references = [str(ground_truth)]
    if not any(references):
        raise ValueError(
            f"{rule}: ground truth: expected a non-empty text, a number, a list of these (any of them is right) or a "
            f"mapping with one of the keys {', '.join(_REFERENCE_KEYS)}, found {ground_truth!r:.200}"
        )
    return references


def _decode(text: str) -> Any:
    """Return the mapping or the list of texts that a text encodes; None for other texts, an interval [1, 2] too."""
    if not _ENCODED.match(text):
        return None
    for decode in (json.loads, ast.literal_eval):
        try:
            value = decode(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, Mapping) or (
            isinstance(value, list) and all(isinstance(v, (str, Mapping)) for v in value)
        ):
            return value
    return None


def is_equal(answer: str, reference: str) -> bool:
    """Whether two answers are equal (see `verl.rewards.rules.answers.compare`).

    A comparison that takes more than 5 s of CPU time or 1 GiB is unequal, with a warning.
    """
    answer, reference = answer.strip(), reference.strip()
    if answer == reference:
        return True
    if _DECIMAL.fullmatch(answer) and _DECIMAL.fullmatch(reference):
        return Decimal(answer) == Decimal(reference)
    if _is_cheap(answer) and _is_cheap(reference):
        return _equal_in_process(answer, reference)
    stops = _stops[answer, reference]
    return stops < 2 and _equal_isolated(answer, reference, stops)


def _is_cheap(text: str) -> bool:
    """Whether comparing the text certainly takes only milliseconds. Conservative."""
    is_short = len(text) <= 120 and sum(map(text.count, "([{")) <= 12
    return bool(_PLAIN.fullmatch(text) or (is_short and _CHEAP.fullmatch(text)))


_equal_in_process = lru_cache(maxsize=4096)(compare.equal)


_stops: Counter[tuple[str, str]] = Counter()  # (answer, reference) of comparisons that exceeded their limits


# Responses to one prompt often share their final answer, so an expensive one is compared only once.
@lru_cache(maxsize=4096)
def _equal_isolated(answer: str, reference: str, stops: int) -> bool:
    """Compare in another process. What was stopped is tried once more when it comes again: `stops` is 0 or 1."""
    outcome = shared_pool().run(Call(address_of(compare.equal), {"answer": answer, "reference": reference}), _LIMITS)
    if outcome.over_limit:
        _stops[answer, reference] += 1
        logger.warning("comparing the answer %.100r with %.100r %s; scored 0", answer, reference, outcome.failure)
        return False
    if outcome.failure is not None:
        raise RuntimeError(
            f"the comparison of {answer!r:.100} with {reference!r:.100} {outcome.failure}"
        ) from outcome.cause
    return outcome.value
