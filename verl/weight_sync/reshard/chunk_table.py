"""Rectangles of tensors that are copied and cast, each by one operator of torch; contiguous ones by one for all."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from verl.utils.shards import Box


class Position(NamedTuple):
    """Where a chunk begins in a tensor.

    Attributes:
        tensor: index in the sources or targets of `ChunkTable.copy`.
        start: first element.
        stride: elements from a row to the next one.
    """

    tensor: int
    start: int
    stride: int

    def view(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> torch.Tensor:
        """The chunk here; a contiguous one has one dimension."""
        tensor, shape, stride = tensors[self.tensor], (rows, columns), (self.stride, 1)
        if self.stride == columns:
            shape, stride = (rows * columns,), (1,)
        return tensor.as_strided(shape, stride, tensor.storage_offset() + self.start)


class ChunkTable:
    """A fixed list of chunks to copy: (rows, columns, position in the sources, position in the targets)."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int, Position, Position]] = []

    def add(self, box: Box, source: Position, target: Position) -> None:
        """Add a chunk of the size of a box."""
        rows, columns = box.rows, box.columns
        if columns == source.stride == target.stride == 1:  # a vector: one row
            rows, columns = 1, rows
            source, target = source._replace(stride=columns), target._replace(stride=columns)
        if rows and columns:
            self.chunks.append((rows, columns, source, target))

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy and cast all chunks between contiguous tensors."""
        copy_chunks(
            [target.view(targets, rows, columns) for rows, columns, _, target in self.chunks],
            [source.view(sources, rows, columns) for rows, columns, source, _ in self.chunks],
        )


def copy_chunks(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, with a cast. Contiguous ones take one call."""
    flat = [i for i, source in enumerate(sources) if source.ndim == targets[i].ndim == 1]
    if flat:
        torch._foreach_copy_([targets[i] for i in flat], [sources[i] for i in flat])
    for target, source in zip(targets, sources):
        if not (source.ndim == target.ndim == 1):
            shape = source.shape if source.ndim == 2 else target.shape
            target.view(shape).copy_(source.view(shape))
