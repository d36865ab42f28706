"""The metrics of several micro-batches, merged as the training engines do."""

from collections.abc import Iterable, Mapping
from typing import Any

from verl.engines.metrics import MetricSums


def merge_metrics(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    sums = MetricSums()
    for metrics in parts:
        sums.add(metrics)
    return {name: total / count if count else 0.0 for name, (total, count) in sums.result().items()}
