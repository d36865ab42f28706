"""Chunks of `reshard` that one kernel copies, casts and sums.

Each element is read and written once, so a push is limited by memory bandwidth.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from verl.utils.shards import Box, Chunk
from verl.weight_sync.position_sums import WORDS, position_weights
from verl.weight_sync.reshard.copies import BufferedChunk, Copies, Key, LocalLayout, Push, RankBucket, sum_index
from verl.weight_sync.reshard.plan import Parameter, Plan, Stored

#: rows and columns that a program of the kernel handles
TILE = (8, 1024)
#: dtypes that the kernel reads and writes -> their numbers
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_ALIGNED = 4  # elements: a thread reads 8 or 16 bytes at a time


class Position(NamedTuple):
    """Where a chunk begins in a tensor.

    Attributes:
        tensor: index in the sources or targets of `ChunkTable.run`.
        start: first element.
        stride: elements from a row to the next one.
    """

    tensor: int
    start: int
    stride: int


class SumFactors(NamedTuple):
    """Word (i, j) of a chunk counts a + b i + c j times in its sum.

    Attributes:
        per_word: elements of a word.
        cell: of the result that the sum is added to.
    """

    a: int
    b: int
    c: int
    per_word: int
    cell: int


class _Chunk(NamedTuple):
    rows: int
    columns: int
    source: Position
    target: Position
    factors: SumFactors

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles, and of those next to each other."""
        across = math.ceil(self.columns / TILE[1])
        return math.ceil(self.rows / TILE[0]) * across, across

    @property
    def is_aligned(self) -> bool:
        numbers = (self.columns, *self.source[1:], *self.target[1:])
        return not any(number % _ALIGNED for number in numbers)


class ChunkTable:
    """A fixed list of chunks.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.chunks: list[_Chunk] = []
        self._tables: list[tuple[bool, torch.Tensor, torch.Tensor]] | None = None

    def add(self, shape: tuple[int, int], source: Position, target: Position, factors: SumFactors) -> None:
        """Add a chunk of so many rows and columns."""
        rows, columns = shape
        if columns == source.stride == target.stride == factors.per_word == 1:  # a vector: one row
            rows, columns, factors = 1, rows, factors._replace(b=0, c=factors.b)
            source, target = source._replace(stride=columns), target._replace(stride=columns)
        if rows and columns:
            self.chunks.append(_Chunk(rows, columns, source, target, factors))

    def tables(self) -> list[tuple[bool, torch.Tensor, torch.Tensor]]:
        """Of aligned chunks and of others: whether aligned, (tiles,) int32, the chunk of each tile, and (chunks, 15)
        int64: rows, columns, source, target, factors, number of the first tile, tiles next to each other."""
        if self._tables is None:
            self._tables = []
            for aligned in (True, False):
                chunks = [chunk for chunk in self.chunks if chunk.is_aligned == aligned]
                if not chunks:
                    continue
                counts = [chunk.tiles[0] for chunk in chunks]
                firsts = [0, *accumulate(counts)]
                rows = [
                    (*chunk[:2], *chunk.source, *chunk.target, *chunk.factors, first, chunk.tiles[1])
                    for chunk, first in zip(chunks, firsts)
                ]
                tiles = torch.arange(len(chunks), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
                self._tables.append((aligned, tiles.to(self.device), torch.tensor(rows).to(self.device)))
        return self._tables

    def run(
        self, sources: "Pointers", targets: "Pointers | None", dtype: torch.dtype, sums: torch.Tensor | None
    ) -> None:
        """Copy and sum all chunks.

        Args:
            sources, targets: the tensors of the chunks' positions; no targets: nothing is written.
            dtype: of the targets, or of the words that are read.
            sums: (cells,) int64, to which the sums are added; None: they are not computed.
        """
        from verl.weight_sync.reshard.chunks_triton import run  # triton comes only with torch for GPUs

        aligned = sources.aligned and (targets is None or targets.aligned)
        for table_aligned, tiles, chunks in self.tables():
            run(tiles, chunks, sources.table, targets and targets.table, dtype, sums, aligned and table_aligned, TILE)


class Pointers:
    """The addresses of tensors on a device, and the numbers of their dtypes.

    Attributes:
        tensors: they keep their memory as long as this object exists.
        table: (tensors, 2) int64, on the device.
        aligned: whether all addresses are multiples of 16 bytes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device):
        self.tensors = tensors
        self.aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
        found = [(tensor.data_ptr(), DTYPES[tensor.dtype]) for tensor in tensors]
        numbers = torch.tensor(found, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.table = numbers.to(device, non_blocking=True)


def is_supported(device: torch.device, plan: Plan) -> bool:
    """Whether the kernel runs on the device and writes the dtypes of the plan."""
    return device.type == "cuda" and all(parameter.dtype in DTYPES for parameter in plan.parameters)


class _FusedBucket:
    """The chunks of a bucket that are sent, kept and received."""

    def __init__(self, bucket: RankBucket, own: LocalLayout, device: torch.device):
        self.dtype, size = bucket.dtype, bucket.dtype.itemsize
        self.sent = sum(bucket.sent)
        self.bytes = self.sent + sum(bucket.received)
        self.keys = bucket.keys
        self._numbers = {key: number for number, key in enumerate(self.keys)}
        self.sends, self.keeps, self.receives = (ChunkTable(device) for _ in range(3))
        for part in bucket.sends:
            target = Position(0, part.start // size, part.move.box.columns)
            self.sends.add(_shape(part), self._source(part, own), target, _factors(part, own.plan))
        for part in bucket.keeps:
            self.keeps.add(_shape(part), self._source(part, own), _target(part, own), _factors(part, own.plan))
        for part in bucket.receives:
            source = Position(0, (self.sent + part.start) // size, part.move.box.columns)
            self.receives.add(_shape(part), source, _target(part, own), SumFactors(0, 0, 0, 1, 0))

    def _source(self, part: BufferedChunk, own: LocalLayout) -> Position:
        (row, column), columns = part.move.at, own.shards[part.key].box.columns
        return Position(self._numbers[part.key], row * columns + column, columns)


def _shape(part: BufferedChunk) -> tuple[int, int]:
    return part.move.box.rows, part.move.box.columns


def _target(part: BufferedChunk, own: LocalLayout) -> Position:
    (row, column), columns = part.move.to, own.stored[part.index].columns
    return Position(part.index, row * columns + column, columns)


def _factors(part: BufferedChunk, plan: Plan) -> SumFactors:
    parameter, box = plan.parameters[part.index], part.move.box
    factors = position_weights(box.top, box.left // parameter.per_word, parameter.counts_columns)
    return SumFactors(*factors, parameter.per_word, sum_index(part, plan))


class FusedCopies(Copies):
    """With one kernel per step, which sums what it copies. What a rank keeps is written where it is stored."""

    def __init__(self, buckets: Sequence[RankBucket], own: LocalLayout, device: torch.device):
        self.buckets = [_FusedBucket(bucket, own, device) for bucket in buckets]
        super().__init__(own.plan, [bucket.bytes for bucket in self.buckets], device)
        self.stored: dict[torch.dtype, ChunkTable] = {}  # by the dtype of the words of the sums
        for index, (parameter, stored) in enumerate(zip(own.plan.parameters, own.stored)):
            self._add_stored(index, parameter, stored)

    def _add_stored(self, index: int, parameter: Parameter, stored: Stored) -> None:
        per_word, columns = parameter.per_word, stored.columns // parameter.per_word
        table = self.stored.setdefault(WORDS[parameter.word], ChunkTable(self.device))
        for chunk in stored.chunks or (Chunk(Box(0, stored.rows, 0, stored.columns)),):  # none: zeros
            box, position = chunk.box, Position(index, chunk.row * columns + chunk.column // per_word, columns)
            factors = position_weights(box.top, box.left // per_word, parameter.counts_columns)
            table.add((box.rows, box.columns // per_word), position, position, SumFactors(*factors, 1, index))

    def push(self, stored: Sequence[torch.Tensor]) -> "Push":
        return _FusedPush(self, stored)


class _FusedPush(Push):
    def __init__(self, copies: FusedCopies, stored: Sequence[torch.Tensor]):
        super().__init__(copies, stored)
        self._stored = Pointers(stored, copies.device)
        kinds = {(number % 2, bucket.dtype) for number, bucket in enumerate(copies.buckets)}
        self._in_slot = {(i, dtype): Pointers([self._slots[i].view(dtype)], copies.device) for i, dtype in kinds}
        self._read: Pointers | None = None  # the shards of the current bucket

    def pack(self, number: int, shards: Mapping[Key, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        bucket, slot = self._copies.buckets[number], self._slots[number % 2]
        self._read = Pointers([self._readable(shards[key], bucket.dtype) for key in bucket.keys], self._copies.device)
        bucket.sends.run(self._read, self._in_slot[number % 2, bucket.dtype], bucket.dtype, self.sums)
        return slot[: bucket.sent], slot[bucket.sent : bucket.bytes]

    def _readable(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the device, in the dtype of the target if the kernel cannot read its own."""
        return tensor.to(self._copies.device, tensor.dtype if tensor.dtype in DTYPES else dtype)

    def keep(self, number: int) -> None:
        bucket = self._copies.buckets[number]
        bucket.keeps.run(self._read, self._stored, bucket.dtype, self.sums)
        self._read = None  # the memory of shards that are copies

    def store(self, number: int) -> None:
        bucket = self._copies.buckets[number]
        bucket.receives.run(self._in_slot[number % 2, bucket.dtype], self._stored, bucket.dtype, None)

    def stored_sums(self) -> torch.Tensor:
        total = torch.zeros(len(self._tensors), dtype=torch.int64, device=self._copies.device)
        for word, table in self._copies.stored.items():
            table.run(self._stored, None, word, total)
        return total
