"""Losses of the micro-batches of a batch, whose metrics are merged as the training engines do."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from verl.engines.micro_batch import MetricSums


def merge_metrics(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    sums = MetricSums()
    for metrics in parts:
        sums.add(metrics)
    return {name: total / count if count else 0.0 for name, (total, count) in sums.result().items()}


def assert_micro_batches_add_up(call: Callable[..., tuple], columns: dict[str, torch.Tensor], sizes: list[int]) -> None:
    """The losses, gradients and metrics of the parts of a batch are those of the batch.

    Args:
        call: columns -> (loss, one gradient or more, None without one, metrics), with the counts of the whole batch.
        sizes: rows of each part.
    """
    whole, *gradients, metrics = call(columns)
    parts = [call({name: column.split(sizes)[i] for name, column in columns.items()}) for i in range(len(sizes))]
    torch.testing.assert_close(sum(part[0] for part in parts), whole, rtol=1e-12, atol=1e-14)
    for i, gradient in enumerate(gradients, start=1):
        if gradient is not None:
            torch.testing.assert_close(torch.cat([part[i] for part in parts]), gradient, rtol=1e-12, atol=1e-14)
    assert merge_metrics([part[-1] for part in parts]) == pytest.approx(merge_metrics([metrics]), rel=1e-12)


def assert_padding_is_never_read(call: Callable[..., tuple], columns: dict[str, torch.Tensor]) -> None:
    """Padding of NaN gives what other numbers give, and has the gradient 0. Arguments as above."""
    loss, *gradients, metrics = call(columns)
    other, *others, other_metrics = call({name: column.nan_to_num(-3.0) for name, column in columns.items()})
    assert torch.equal(loss, other) and merge_metrics([metrics]) == merge_metrics([other_metrics])
    for gradient, filled in zip(gradients, others):
        if gradient is not None:
            assert torch.isfinite(gradient).all() and torch.equal(gradient, filled)
            assert (gradient[columns["response_mask"] == 0] == 0).all()
