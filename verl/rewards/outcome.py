"""The result of a reward function for one sample: score and extra values, or the reason why there is no score."""

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
    """A reward function returned no valid score. Names the function, its file and line, the sample and its texts."""


class BadOutcome(ValueError):
    """A call returned no valid score. The message is a predicate: its subject is the function's name."""


@dataclass(frozen=True)
class Sample:
    """One response to score.

    For a function that takes lists, one Sample holds the whole batch, with a list in each field.
    """

    data_source: str  # selects the rule
    solution_str: str  # the response as text
    ground_truth: Any  # what the response is compared with
    extra_info: Mapping[str, Any]  # further columns of the row, its `extra_info` and what the run adds
    number: int  # index in the batch; used in messages, as are `total` and `uid`
    total: int  # size of the batch
    uid: Any = None  # identifier of the prompt
    prompt: Any = None  # messages or text
    result: Mapping[str, Any] | None = None  # of an agent loop that has scored it: the reward function is not called

    def describe(self) -> str:
        """Describe the sample for an error message: index, response, ground truth, expected score."""
        parts = [f"sample {self.number} of {self.total}", f"data_source {self.data_source!r}"]
        if self.uid is not None:
            parts.append(f"uid {self.uid!r}")
        if "index" in self.extra_info:
            parts.append(f"index {self.extra_info['index']!r}")
        return (
            f"  {', '.join(parts)}\n"
            f"  response: {shorten(self.solution_str)}\n"
            f"  ground truth: {shorten(self.ground_truth)}\n"
            '  expected: a finite number, or a dict with such a "score" (on_error=count scores such samples as failed)'
        )


def shorten(value: Any) -> str:
    """Return the repr of a value; if it is longer than 200 characters, without its middle."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:133]} ... {text[-67:]} ({len(text)} characters)"


def read_outcome(outcome: Outcome) -> tuple[float, dict[str, Any]]:
    """Return the score and the extra values of a call.

    Accepted are a finite number (Python, numpy, a tensor without dimensions), a bool, or a mapping with such a "score".

    Raises:
        BadOutcome: For a failed call or any other value.
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
    """Split the outcome of a call for a whole batch into one outcome for each of its `count` samples."""
    if outcome.failure is not None:
        return [outcome] * count
    value = outcome.value
    if not isinstance(value, Sequence) and _is_array(value) and value.ndim:
        value = list(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != count:
        actual = f"{len(value)} entries" if isinstance(value, Sequence) else _format_value(value)
        failure = f"returned {actual}: expected a list with one entry for each of {count} samples"
        return [Outcome(failure=failure)] * count
    return [Outcome(entry) for entry in value]


def _is_array(value: Any) -> bool:
    """Whether `value` is a numpy array or a tensor. Imports torch, so it is called for unusual values only."""
    import torch

    return isinstance(value, np.ndarray | torch.Tensor)


def _format_value(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {shorten(value)}"


def _number(value: Any, inside: str) -> float:
    if not isinstance(value, _NUMBERS) and _is_array(value):
        if value.ndim:
            raise BadOutcome(f"returned {inside}an array of shape {tuple(value.shape)}: expected one number")
        value = value.item()
    if not isinstance(value, _NUMBERS):
        raise BadOutcome(f"returned {inside}{_format_value(value)}: expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > _LARGEST:
        raise BadOutcome(f"returned {inside}{number}: expected a finite number in the range of float32")
    return number
