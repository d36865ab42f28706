"""What a reward function gave for one row: the score and its extra values, or the reason why there is none."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from verl.rewards.sandbox.pool import Outcome

_NUMBERS = numbers.Real | Decimal | np.bool_

_LARGEST = 3.4e38  # rewards travel as float32


class RewardError(ValueError):
    """A reward function gave no usable score: names the function, its file and line, the row and its texts."""


class BadOutcome(ValueError):
    """Why a call gave no score: a phrase that follows the function's name."""


@dataclass(frozen=True)
class Row:
    """One answer to be scored; `number` of `total` and `uid` are there to name it in messages.

    For a function that takes lists, one Row stands for the whole batch, with a list in each field.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    number: int
    total: int
    uid: Any = None

    def describe(self) -> str:
        """For an error message: which row, the answer, the ground truth, what was expected."""
        parts = [f"row {self.number} of {self.total}", f"data_source {self.data_source!r}"]
        if self.uid is not None:
            parts.append(f"uid {self.uid!r}")
        if "index" in self.extra_info:
            parts.append(f"index {self.extra_info['index']!r}")
        return (
            f"  {', '.join(parts)}\n"
            f"  response: {shorten(self.solution_str)}\n"
            f"  ground truth: {shorten(self.ground_truth)}\n"
            '  expected: a finite number, or a dict with such a "score" (on_error=count goes on without such rows)'
        )


def shorten(value: Any, limit: int = 200) -> str:
    """A text or any value on one line, the middle left out where it is longer than `limit` characters."""
    text = repr(value)
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]} ... {text[-limit // 3 :]} ({len(text)} characters)"


def read_outcome(outcome: Outcome) -> tuple[float, dict[str, Any]]:
    """Score and extra values of what a call gave. Raises BadOutcome that says what is wrong with it.

    Accepted: a finite number (Python, numpy, a tensor without dimensions), a bool, or a mapping with such a "score".
    """
    if outcome.failure is not None:
        raise BadOutcome(outcome.failure) from outcome.cause
    value = outcome.value
    if not isinstance(value, Mapping):
        return _number(value, ""), {}
    if "score" not in value:
        raise BadOutcome(f'returned a dict without "score": it has {", ".join(map(repr, value)) or "no keys"}')
    extra = {str(k): v for k, v in value.items() if k != "score"}
    return _number(value["score"], 'a dict whose "score" is '), extra


def split_outcome(outcome: Outcome, count: int) -> list[Outcome]:
    """The outcome of a call for a whole batch, as one for each of its `count` rows."""
    if outcome.failure is not None:
        return [outcome] * count
    value = outcome.value
    if not isinstance(value, Sequence) and _is_array(value) and value.ndim:
        value = list(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != count:
        found = f"{len(value)} entries" if isinstance(value, Sequence) else _described(value)
        return [Outcome(failure=f"returned {found}: expected a list with one entry for each of {count} rows")] * count
    return [Outcome(entry) for entry in value]


def _is_array(value: Any) -> bool:
    """Whether `value` is a numpy array or a tensor. torch is imported only when something unusual was returned."""
    import torch

    return isinstance(value, np.ndarray | torch.Tensor)


def _described(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {shorten(value)}"


def _number(value: Any, inside: str) -> float:
    if not isinstance(value, _NUMBERS) and _is_array(value):
        if value.ndim:
            raise BadOutcome(f"returned {inside}an array of shape {tuple(value.shape)}: expected one number")
        value = value.item()
    if not isinstance(value, _NUMBERS):
        raise BadOutcome(f"returned {inside}{_described(value)}: expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > _LARGEST:
        raise BadOutcome(f"returned {inside}{number}: expected a finite number (of float32)")
    return number
