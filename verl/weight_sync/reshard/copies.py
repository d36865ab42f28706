"""What one rank does in a reshard: the chunks that it reads, sends, keeps, receives and stores, and their sums."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from verl.utils.shards import Box, Shard
from verl.weight_sync.position_sums import PositionSums, Summed
from verl.weight_sync.reshard.plan import Bucket, Move, Plan, RankLayout, Stored, room

#: (parameter, index of the shard on this rank)
Key = tuple[int, int]


class LocalLayout:
    """What this rank has in training and stores, by the numbers of the parameters in the plan."""

    def __init__(self, rank: int, layout: RankLayout, plan: Plan):
        self.rank, self.plan = rank, plan
        numbers = {parameter.name: index for index, parameter in enumerate(plan.parameters)}
        self.stored: list[Stored] = [layout.stored[parameter.name] for parameter in plan.parameters]
        self.names = [parameter.name for parameter in plan.parameters]
        self.shards: dict[Key, Shard] = {}  # in the order of reading
        count = [0] * len(numbers)
        for shard in layout.shards:
            index = numbers[shard.name]
            self.shards[index, count[index]] = shard
            count[index] += 1


class BufferedChunk(NamedTuple):
    """A move of a bucket, and where its chunk is in a buffer.

    Attributes:
        start: first byte.
    """

    index: int
    move: Move
    start: int

    @property
    def key(self) -> Key:
        """Of the shard that it is read from."""
        return self.index, self.move.shard


class RankBucket:
    """The share of one rank in a bucket.

    Attributes:
        sends, receives: chunks for and from other ranks, by rank. They are in a buffer each.
        keeps: chunks that this rank has and stores. `TorchCopies` puts them after those that it sends.
        keys: of the shards that are read.
        sent, received: bytes to and from each rank.
        kept: bytes of what is kept.
    """

    def __init__(self, bucket: Bucket, own: LocalLayout):
        self.dtype, rank, ranks = bucket.dtype, own.rank, own.plan.ranks
        self.sends: list[BufferedChunk] = []
        self.keeps: list[BufferedChunk] = []
        self.receives: list[BufferedChunk] = []
        self.sent, self.received = [0] * ranks, [0] * ranks
        outgoing: list[list[tuple[int, Move]]] = [[] for _ in range(ranks)]
        incoming: list[list[tuple[int, Move]]] = [[] for _ in range(ranks)]
        for index, move in bucket.moves:
            if move.source == rank:
                outgoing[move.target].append((index, move))
            elif move.target == rank:
                incoming[move.source].append((index, move))
        others = [other for other in range(ranks) if other != rank]
        at = 0
        for other in others:
            self.sent[other] = self._add(self.sends, outgoing[other], at)
            at += self.sent[other]
        self.kept = self._add(self.keeps, outgoing[rank], at)
        self.keys: list[Key] = list(dict.fromkeys(part.key for part in (*self.sends, *self.keeps)))
        at = 0
        for other in others:
            self.received[other] = self._add(self.receives, incoming[other], at)
            at += self.received[other]

    def _add(self, parts: list[BufferedChunk], moves: Sequence[tuple[int, Move]], start: int) -> int:
        """Add moves whose chunks begin at this byte. Returns their bytes."""
        at = start
        for index, move in moves:
            parts.append(BufferedChunk(index, move, at))
            at += room(move, self.dtype)
        return at - start


def sum_index(part: BufferedChunk, plan: Plan) -> int:
    """Where the sums of what is sent are added: by target, whether it is the first that needs the chunk, parameter."""
    return (2 * part.move.target + part.move.first) * len(plan.parameters) + part.index


class Copies(ABC):
    """The copies and sums of all buckets of a rank, computed once per layout.

    Attributes:
        sizes: bytes of the two slots; see `Push`.
    """

    def __init__(self, plan: Plan, sizes: Sequence[int], device: torch.device):
        """sizes: bytes that each bucket needs in its slot."""
        self.plan, self.device = plan, device
        self.sizes = [max(sizes[parity::2], default=0) for parity in (0, 1)]

    @abstractmethod
    def push(self, stored: Sequence[torch.Tensor]) -> "Push":
        """Begin a push to the tensors that the rank stores, by parameter."""


class Push(ABC):
    """The copies of one push: for each bucket `pack`, `keep` while it is sent, and `store` after it has been received.

    Two buckets are in memory: a slot is a buffer of (bytes,) uint8, first what is sent, last what is received.

    Attributes:
        sums: of what is sent and kept, (2 * ranks * parameters,) int64; see `sum_index`.
    """

    def __init__(self, copies: Copies, stored: Sequence[torch.Tensor]):
        plan, device = copies.plan, copies.device
        self._copies, self._tensors = copies, stored
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for size in copies.sizes]
        self.sums = torch.zeros(2 * plan.ranks * len(plan.parameters), dtype=torch.int64, device=device)

    @abstractmethod
    def pack(self, number: int, shards: Mapping[Key, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy what a bucket sends to its slot. Returns where that is, and where to receive."""

    @abstractmethod
    def keep(self, number: int) -> None:
        """Copy what the rank keeps to where it is stored."""

    @abstractmethod
    def store(self, number: int) -> None:
        """Copy what has been received to where it is stored."""

    @abstractmethod
    def stored_sums(self) -> torch.Tensor:
        """Of what the rank stores of every parameter: (parameters,) int64."""


# ---- with operators of torch ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy:
    """One chunk in a buffer, and where it is in a tensor: a shard that it is read from, or a stored tensor.

    Attributes:
        key: of the shard; (parameter, -1) of a stored tensor.
        start: first element in the buffer.
        at: first element in the tensor.
        shape, stride: in the tensor; a contiguous chunk has one dimension.
    """

    key: Key
    start: int
    at: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The chunk of the tensor, which is contiguous."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.at)

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """The chunk in the buffer."""
        stride = (1,) if len(self.shape) == 1 else (self.shape[1], 1)
        return buffer.as_strided(self.shape, stride, buffer.storage_offset() + self.start)


def _copy_of(key: Key, box: Box, at: tuple[int, int], columns: int, start: int) -> _Copy:
    """at: row and column in a tensor with so many columns. start: first element in the buffer."""
    first = at[0] * columns + at[1]
    if box.columns == columns:
        return _Copy(key, start, first, (box.numel,), (1,))
    return _Copy(key, start, first, (box.rows, box.columns), (columns, 1))


class _TorchBucket:
    """The copies of a bucket, and the sums of what is sent and kept, which are in one buffer."""

    def __init__(self, bucket: RankBucket, own: LocalLayout, device: torch.device):
        self.dtype, plan, size = bucket.dtype, own.plan, bucket.dtype.itemsize
        self.reads = [
            _copy_of(part.key, part.move.box, part.move.at, own.shards[part.key].box.columns, part.start // size)
            for part in (*bucket.sends, *bucket.keeps)
        ]
        self.keeps, self.stores = (
            [
                _copy_of((index, -1), move.box, move.to, own.stored[index].columns, at // size)
                for index, move, at in parts
            ]
            for parts in (bucket.keeps, bucket.receives)
        )
        self.sent = sum(bucket.sent)
        self.packed = self.sent + bucket.kept
        self.bytes = self.packed + sum(bucket.received)
        self.sums = PositionSums(2 * plan.ranks * len(plan.parameters), device)
        for part in (*bucket.sends, *bucket.keeps):
            self._add_sums(part, plan)

    def _add_sums(self, part: BufferedChunk, plan: Plan) -> None:
        parameter, box, cell = plan.parameters[part.index], part.move.box, sum_index(part, plan)
        columns = box.columns // parameter.per_word
        self.sums.add(Summed(0, part.start, box.rows, columns, parameter.word, 1), [(box.top, box.rows, cell)])
        if parameter.counts_columns:
            of_columns = Summed(0, part.start, box.rows, columns, parameter.word, 0)
            self.sums.add(of_columns, [(box.left // parameter.per_word, columns, cell)])


class TorchCopies(Copies):
    """With operators of torch, on any device. What a rank keeps goes through the buffer in which it is summed."""

    def __init__(self, buckets: Sequence[RankBucket], own: LocalLayout, device: torch.device):
        self.buckets = [_TorchBucket(bucket, own, device) for bucket in buckets]
        super().__init__(own.plan, [bucket.bytes for bucket in self.buckets], device)
        self.stored_sums = _sums_of_stored(own, device)

    def push(self, stored: Sequence[torch.Tensor]) -> "Push":
        return _TorchPush(self, stored)


class _TorchPush(Push):
    def _buffers(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent and kept, and what is received."""
        bucket, slot = self._copies.buckets[number], self._slots[number % 2]
        return slot[: bucket.packed].view(bucket.dtype), slot[bucket.packed : bucket.bytes].view(bucket.dtype)

    def pack(self, number: int, shards: Mapping[Key, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        bucket, (packed, received) = self._copies.buckets[number], self._buffers(number)
        chunks = [copy.of(shards[copy.key]) for copy in bucket.reads]
        _copy([copy.in_buffer(packed) for copy in bucket.reads], chunks)
        return packed.view(torch.uint8)[: bucket.sent], received.view(torch.uint8)

    def keep(self, number: int) -> None:
        packed, _ = self._buffers(number)
        self.sums += self._copies.buckets[number].sums.of([packed])
        self._write(self._copies.buckets[number].keeps, packed)

    def store(self, number: int) -> None:
        self._write(self._copies.buckets[number].stores, self._buffers(number)[1])

    def stored_sums(self) -> torch.Tensor:
        return self._copies.stored_sums.of(self._tensors)

    def _write(self, copies: list[_Copy], buffer: torch.Tensor) -> None:
        chunks = [copy.in_buffer(buffer) for copy in copies]
        _copy([copy.of(self._tensors[copy.key[0]]) for copy in copies], chunks)


def _sums_of_stored(own: LocalLayout, device: torch.device) -> PositionSums:
    """The sums of what this rank stores of every parameter."""
    sums = PositionSums(len(own.stored), device)
    for index, (parameter, stored) in enumerate(zip(own.plan.parameters, own.stored)):
        per_word, columns = parameter.per_word, stored.columns // parameter.per_word
        boxes = [chunk.box for chunk in sorted(stored.chunks, key=lambda chunk: (chunk.row, chunk.column))]
        ranges = {dim: [(0, size, index)] for dim, size in ((1, stored.rows), (0, columns))}  # of zeros
        if boxes:
            ranges[1] = [(box.top, box.rows, index) for box in boxes]
            ranges[0] = [(box.left // per_word, box.columns // per_word, index) for box in boxes]
            if len({(box.left, box.right) for box in boxes}) == 1:  # chunks below each other
                ranges[0] = ranges[0][:1]
            elif len({(box.top, box.bottom) for box in boxes}) == 1:  # next to each other
                ranges[1] = ranges[1][:1]
            else:
                raise ValueError(f"weight sync: {parameter.name}: expected chunks of the same rows or columns: {boxes}")
        for dim in (1, 0) if parameter.counts_columns else (1,):
            sums.add(Summed(index, 0, stored.rows, columns, parameter.word, dim), ranges[dim])
    return sums


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, with a cast. Contiguous ones take one call."""
    flat = [i for i, source in enumerate(sources) if source.ndim == targets[i].ndim == 1]
    if flat:
        torch._foreach_copy_([targets[i] for i in flat], [sources[i] for i in flat])
    for target, source in zip(targets, sources):
        if not (source.ndim == target.ndim == 1):
            target.copy_(source.view_as(target) if source.ndim == 1 else source)
