"""Splits a mini-batch into micro-batches, by a number of sequences or by a token budget, and merges their metrics."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from verl.algorithms.masked import Largest
from verl.engines.base import MicroBatching, Tensors
from verl.engines.token_budget import MAX_AUTO_TOKENS
from verl.modeling.shared_prefix import plan_shared_prefixes
from verl.modeling.vision import INDEX, Media
from verl.protocol import DataProto
from verl.utils.balance import token_budget_micro_batches


def plan_micro_batches(
    lengths: list[int],
    micro: MicroBatching,
    shared: Tensors | None = None,
    budget_factor: int = 1,
    padded: bool = False,
) -> list[list[int]]:
    """Assign every row to one micro-batch.

    Args:
        lengths: tokens of each row, prompt and response.
        shared: the columns of the rows if rows with the same prompt compute it once per micro-batch; a prompt then
            counts once in a token budget.
        budget_factor: number of ranks that share the tokens of a row; the token budget is per rank.
        padded: rows are padded to the longest of their micro-batch, so rows of similar length share one, and padding
            counts in a token budget.

    Returns:
        Row indices of each micro-batch.
    """
    budget = max(MAX_AUTO_TOKENS, *lengths) if micro.tokens == "auto" else micro.tokens
    if budget is not None:
        budget *= budget_factor
        chunks = token_budget_micro_batches(lengths, budget)
        if padded:
            return _padded_micro_batches(lengths, budget)
        if shared is None:
            return chunks
        with_prefixes = plan_shared_prefixes(shared, lengths, budget)
        return with_prefixes if len(with_prefixes) <= len(chunks) else chunks
    size = micro.rows or len(lengths)
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row] if padded else 0)
    return [sorted(rows[i : i + size]) for i in range(0, len(rows), size)]


def _padded_micro_batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Rows from the longest to the shortest, as many at a time as fit into the budget with padding."""
    chunks: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not chunks or (len(chunks[-1]) + 1) * lengths[chunks[-1][0]] > budget:
            chunks.append([])
        chunks[-1].append(row)
    return [sorted(rows) for rows in chunks]


def split_to(chunks: list[list[int]], count: int) -> list[list[int]]:
    """Split into exactly `count` micro-batches, by halving the largest ones.

    Ranks that shard a model run its layers in lockstep, so they need the same number of micro-batches.
    """
    chunks = list(chunks)
    while len(chunks) < count:
        largest = max(range(len(chunks)), key=lambda i: len(chunks[i]))
        rows = chunks[largest]
        if len(rows) < 2:
            raise ValueError(f"{sum(map(len, chunks))} rows cannot be split into {count} micro-batches")
        chunks[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return chunks


def host_columns(batch: DataProto, names: tuple[str, ...], config: PretrainedConfig) -> tuple[Tensors, Media | None]:
    """Tensor columns on the host, where micro-batches are assembled, and the images of the rows, if any.

    Args:
        config: the model's config, which determines how images are encoded.
    """
    columns = {name: batch.column(name).cpu() for name in names}
    rows = batch.non_tensor_batch.get("multi_modal_inputs")
    if rows is None or all(row is None for row in rows):
        return columns, None
    media = Media(config, rows)
    return columns | {"position_ids": media.positions(columns), INDEX: media.index}, media


def take_rows(columns: Tensors, rows: list[int]) -> Tensors:
    """The columns of some rows."""
    return {name: values[rows] for name, values in columns.items()}


def join_rows(chunks: list[tuple[list[int], Tensors]], count: int) -> Tensors:
    """The outputs of all rows, from (rows, outputs) of each micro-batch, as float32 or integers.

    Narrower ones are padded by -1. count: the number of rows.
    """
    joined: Tensors = {}
    for name, first in chunks[0][1].items():
        width = max(outputs[name].shape[1] for _, outputs in chunks)
        dtype = torch.float32 if first.is_floating_point() else first.dtype
        joined[name] = first.new_full((count, width, *first.shape[2:]), -1, dtype=dtype)
        for rows, outputs in chunks:
            joined[name][rows, : outputs[name].shape[1]] = outputs[name].to(dtype)
    return joined


# ---- metrics, which merge exactly into those of a mini-batch, of a step, and of all ranks ---------------------------


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
