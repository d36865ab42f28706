"""Metrics that operators report in `meta_info["metrics"]`, and how those of several passes are merged.

A metric is a number, a pair (sum, count), or a `Total`. With an operator that holds the batch (dynamic sampling), a
training step is several passes; its metrics describe all of them:

- a pair (sum, count): the total sum over the total count
- a `Total`: the sum
- a number whose name ends in `max` or `min` (`_max`, `/max`): the largest or smallest
- any other number: the mean over the rows of the passes
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Total:
    """A count, such as of failed samples: the counts of several passes are added."""

    value: float


def merge_passes(passes: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    """Merge the metrics that one operator reported in several passes.

    Args:
        passes: for each pass, the metrics and the number of rows that they describe.

    Returns:
        One value per metric: a number, or what the operator reported if there is one pass only. A pair whose total
        count is 0 is dropped.

    Raises:
        ValueError: a value is none of the kinds above, or of different kinds in different passes.
    """
    reported: dict[str, list[tuple[Any, int]]] = {}
    for metrics, rows in passes:
        for name, value in metrics.items():
            reported.setdefault(name, []).append((value, rows))
    merged = {name: _merge(name, values) for name, values in reported.items()}
    return {name: value for name, value in merged.items() if value is not None}


def _merge(name: str, values: list[tuple[Any, int]]) -> Any:
    if all(isinstance(value, tuple) and len(value) == 2 for value, _ in values):
        total, count = (sum(float(x) for x in parts) for parts in zip(*(value for value, _ in values)))
        return total / count if count else None
    if all(isinstance(value, Total) for value, _ in values):
        return float(sum(value.value for value, _ in values))
    if len(values) == 1:
        return values[0][0]
    numbers = [_number(name, value) for value, _ in values]
    if name.endswith(("_max", "/max")):
        return max(numbers)
    if name.endswith(("_min", "/min")):
        return min(numbers)
    rows = sum(rows for _, rows in values)
    return sum(number * weight for number, (_, weight) in zip(numbers, values)) / rows


def _number(name: str, value: Any) -> float:
    if isinstance(value, Real) or getattr(value, "numel", lambda: 0)() == 1:
        return float(value)
    raise ValueError(
        f"metric {name!r}: expected a number, a pair (sum, count) or a Total in every pass, found {value!r}"
    )
