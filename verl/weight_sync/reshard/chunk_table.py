"""Rectangles of tensors that are copied and cast at once: by one Triton kernel on a GPU, or by operators of torch.

The kernel reads and writes each element once, so a push is limited by memory bandwidth.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from verl.utils.shards import Box

#: rows and columns that a program of the kernel copies
TILE = (8, 1024)
#: dtypes that the kernel reads and writes -> their numbers
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_ALIGNED = 4  # elements: a thread reads 8 or 16 bytes at a time


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


class _Chunk(NamedTuple):
    rows: int
    columns: int
    source: Position
    target: Position

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles, and of those next to each other."""
        across = math.ceil(self.columns / TILE[1])
        return math.ceil(self.rows / TILE[0]) * across, across

    @property
    def is_aligned(self) -> bool:
        numbers = (self.columns, *self.source[1:], *self.target[1:])
        return not any(number % _ALIGNED for number in numbers)

    def view(self, position: Position, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The chunk at one of its positions; contiguous ones have one dimension."""
        tensor, shape, stride = tensors[position.tensor], (self.rows, self.columns), (position.stride, 1)
        if position.stride == self.columns:
            shape, stride = (self.rows * self.columns,), (1,)
        return tensor.as_strided(shape, stride, tensor.storage_offset() + position.start)


class TensorList:
    """Contiguous tensors that chunks are copied from, or to.

    Attributes:
        table: (tensors, 2) int64 on the device: addresses, and numbers of dtypes.
        is_aligned: whether all addresses are multiples of 16 bytes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device):
        self.tensors = tensors
        self.device = device

    @cached_property
    def table(self) -> torch.Tensor:
        rows = [(tensor.data_ptr(), DTYPES.get(tensor.dtype, -1)) for tensor in self.tensors]
        numbers = torch.tensor(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return numbers.to(self.device, non_blocking=True)

    @cached_property
    def is_aligned(self) -> bool:
        return not any(tensor.data_ptr() % 16 for tensor in self.tensors)


class ChunkTable:
    """A fixed list of chunks to copy.

    Args:
        device: of the tensors.
        dtype: of the targets.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self.chunks: list[_Chunk] = []

    def add(self, box: Box, source: Position, target: Position) -> None:
        """Add a chunk of the size of a box."""
        rows, columns = box.rows, box.columns
        if columns == source.stride == target.stride == 1:  # a vector: one row
            rows, columns = 1, rows
            source, target = source._replace(stride=columns), target._replace(stride=columns)
        if rows and columns:
            self.chunks.append(_Chunk(rows, columns, source, target))

    def copy(self, sources: TensorList, targets: TensorList) -> None:
        """Copy and cast all chunks."""
        if self.device.type != "cuda" or self.dtype not in DTYPES:
            copy_chunks(
                [chunk.view(chunk.target, targets.tensors) for chunk in self.chunks],
                [chunk.view(chunk.source, sources.tensors) for chunk in self.chunks],
            )
            return
        from verl.weight_sync.reshard.chunks_triton import run  # triton comes only with torch for GPUs

        is_aligned = sources.is_aligned and targets.is_aligned
        for table_aligned, tiles, chunks in self.tables:
            run(tiles, chunks, sources.table, targets.table, self.dtype, is_aligned and table_aligned, TILE)

    @cached_property
    def tables(self) -> list[tuple[bool, torch.Tensor, torch.Tensor]]:
        """For the kernel, one of aligned chunks and one of others: whether aligned, (tiles,) int32, the chunk of each
        tile, and (chunks, 10) int64: rows, columns, source, target, number of the first tile, tiles next to each
        other."""
        tables = []
        for aligned in (True, False):
            chunks = [chunk for chunk in self.chunks if chunk.is_aligned == aligned]
            if not chunks:
                continue
            counts = [chunk.tiles[0] for chunk in chunks]
            firsts = [0, *accumulate(counts)]
            rows = [
                (chunk.rows, chunk.columns, *chunk.source, *chunk.target, first, chunk.tiles[1])
                for chunk, first in zip(chunks, firsts)
            ]
            tiles = torch.arange(len(chunks), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
            tables.append((aligned, tiles.to(self.device), torch.tensor(rows).to(self.device)))
        return tables


def readable_tensors(tensors: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype) -> TensorList:
    """Sources on the device. dtype: of the targets, to which those are cast that the kernel cannot read."""
    on_device = [tensor.to(device, tensor.dtype if tensor.dtype in DTYPES else dtype) for tensor in tensors]
    return TensorList(on_device, device)


def copy_chunks(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, with a cast. Contiguous ones take one call."""
    flat = [i for i, source in enumerate(sources) if source.ndim == targets[i].ndim == 1]
    if flat:
        torch._foreach_copy_([targets[i] for i in flat], [sources[i] for i in flat])
    for target, source in zip(targets, sources):
        if not (source.ndim == target.ndim == 1):
            shape = source.shape if source.ndim == 2 else target.shape
            target.view(shape).copy_(source.view(shape))
