"""Metrics of micro-batches that merge exactly into those of the mini-batch."""

from collections import defaultdict
from typing import Any

import torch


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


class MetricSums:
    """Adds up metrics: a pair (sum, count) merges exactly; a plain number counts once per row it speaks of.

    Values stay tensors until `result`, so that a device is not waited for at every micro-batch.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = defaultdict(float)
        self._counts: dict[str, Any] = defaultdict(float)

    def add(self, metrics: dict[str, Any], rows: int) -> None:
        for name, value in metrics.items():
            total, count = value if isinstance(value, tuple) else (value * rows, rows)
            self._sums[name] = self._sums[name] + total
            self._counts[name] = self._counts[name] + count

    def result(self) -> dict[str, float]:
        counts = {name: _number(count) for name, count in self._counts.items()}
        return {name: _number(total) / counts[name] if counts[name] else 0.0 for name, total in self._sums.items()}
