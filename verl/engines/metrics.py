"""Metrics of micro-batches that merge exactly into those of a mini-batch, of a step, and of all ranks."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from verl.algorithms.masked import Largest


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


class MetricSums:
    """Accumulates metrics.

    A pair (sum, count) merges exactly, a plain number is weighted by its rows, and a `Largest` is reduced by the
    maximum. Values stay tensors until `result`, so that the host does not synchronize at every micro-batch.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = defaultdict(float)
        self._counts: dict[str, Any] = defaultdict(float)
        self._largest: dict[str, list[Any]] = defaultdict(list)

    def add(self, metrics: dict[str, Any], rows: int = 1) -> None:
        """Add the metrics of a micro-batch or mini-batch of `rows` rows."""
        for name, value in metrics.items():
            if isinstance(value, Largest):
                self._largest[name].append(value.value)
                continue
            total, count = value if isinstance(value, tuple) else (value * rows, rows)
            self._sums[name] = self._sums[name] + total
            self._counts[name] = self._counts[name] + count

    def result(
        self, max_over_ranks: Callable[[list[float]], list[float]] = lambda values: values
    ) -> dict[str, tuple[float, float]]:
        """Name -> (sum, count), still as pairs: the ranks of a group are merged by the same rule.

        Args:
            max_over_ranks: reduces the `Largest` values over the ranks that share a mini-batch.
        """
        pairs = {name: (_number(total), _number(self._counts[name])) for name, total in self._sums.items()}
        if not self._largest:
            return pairs
        largest = max_over_ranks([max(map(_number, values)) for values in self._largest.values()])
        return pairs | {name: (value, 1.0) for name, value in zip(self._largest, largest)}
