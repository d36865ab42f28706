"""Metrics of micro-batches that merge exactly into those of a mini-batch, of a step, and of all ranks."""

from collections import defaultdict
from typing import Any

import torch


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


class MetricSums:
    """Adds up metrics: a pair (sum, count) merges exactly; a plain number counts once per row that it speaks of.

    Values stay tensors until `result`, so that a device is not waited for at every micro-batch.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = defaultdict(float)
        self._counts: dict[str, Any] = defaultdict(float)

    def add(self, metrics: dict[str, Any], rows: int = 1) -> None:
        for name, value in metrics.items():
            total, count = value if isinstance(value, tuple) else (value * rows, rows)
            self._sums[name] = self._sums[name] + total
            self._counts[name] = self._counts[name] + count

    def result(self) -> dict[str, tuple[float, float]]:
        """name -> (sum, count), still a pair: the ranks of a group are merged by the same rule."""
        return {name: (_number(total), _number(self._counts[name])) for name, total in self._sums.items()}
