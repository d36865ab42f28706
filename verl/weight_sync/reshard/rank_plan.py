"""The share of one rank in a plan: the shards that it reads, and the copies to and from buffers and stored tensors."""

from collections.abc import Iterable

import torch

from verl.utils.shards import Shard
from verl.weight_sync.reshard.chunk_table import ChunkTable, Position
from verl.weight_sync.reshard.plan import Bucket, Move, Plan, RankLayout, Stored, buffer_bytes

#: (number of the parameter, index of the shard among those that this rank has of it)
Key = tuple[int, int]


class RankPlan:
    """The share of one rank in a plan. Parameters have the numbers that they have there.

    Attributes:
        names: of the parameters.
        stored: what this rank stores of each parameter.
        shards: the shards that this rank has, in the order of reading.
        buckets: its share in each bucket.
        last_use: number of the last bucket that reads a shard; shards that no bucket reads are not in it.
        slot_bytes: sizes of the two buffers that consecutive buckets alternate in.
    """

    def __init__(self, plan: Plan, rank: int, layout: RankLayout, device: torch.device):
        self.plan, self.rank, self.device = plan, rank, device
        self.names = [parameter.name for parameter in plan.parameters]
        self.stored: list[Stored] = [layout.stored[name] for name in self.names]
        self.shards: dict[Key, Shard] = {}
        count = dict.fromkeys(self.names, 0)
        numbers = {name: number for number, name in enumerate(self.names)}
        for shard in layout.shards:
            self.shards[numbers[shard.name], count[shard.name]] = shard
            count[shard.name] += 1
        self.buckets = [RankBucket(bucket, self) for bucket in plan.buckets]
        self.last_use = {key: number for number, bucket in enumerate(self.buckets) for key in bucket.keys}
        sizes = [bucket.bytes for bucket in self.buckets]
        self.slot_bytes = [max(sizes[parity::2], default=0) for parity in (0, 1)]


class RankBucket:
    """The share of one rank in a bucket. Its buffer has the chunks that it sends, by rank, then those that it receives.

    Attributes:
        keys: of the shards that it reads.
        sends: copies from shards to the buffer.
        keeps: copies from shards to stored tensors.
        receives: copies from the buffer to stored tensors.
        sent, received: bytes to and from each rank.
    """

    def __init__(self, bucket: Bucket, rank_plan: RankPlan):
        self.dtype, self._rank_plan = bucket.dtype, rank_plan
        moves, rank = bucket.moves, rank_plan.rank
        kept = [(number, move) for number, move in moves if move.source == rank == move.target]
        outgoing = [(number, move) for number, move in moves if move.source == rank != move.target]
        incoming = [(number, move) for number, move in moves if move.target == rank != move.source]
        outgoing.sort(key=lambda entry: entry[1].target)
        incoming.sort(key=lambda entry: entry[1].source)
        self.keys: list[Key] = list(dict.fromkeys((number, move.shard) for number, move in (*outgoing, *kept)))
        self._sources = {key: source for source, key in enumerate(self.keys)}
        self.sends, self.keeps, self.receives = (ChunkTable(rank_plan.device, bucket.dtype) for _ in range(3))
        self.sent, self.received = [0] * rank_plan.plan.ranks, [0] * rank_plan.plan.ranks
        for number, move in kept:
            self.keeps.add(move.box, self._in_shard(number, move), self._in_stored(number, move))
        start = 0
        for number, move in outgoing:
            self.sends.add(move.box, self._in_shard(number, move), self._in_buffer(start, move))
            start += self._count(self.sent, move.target, move)
        for number, move in incoming:
            self.receives.add(move.box, self._in_buffer(start, move), self._in_stored(number, move))
            start += self._count(self.received, move.source, move)
        self.bytes = start

    def _count(self, sizes: list[int], rank: int, move: Move) -> int:
        size = buffer_bytes(move, self.dtype)
        sizes[rank] += size
        return size

    def _in_shard(self, number: int, move: Move) -> Position:
        (row, column), columns = move.at, self._rank_plan.shards[number, move.shard].box.columns
        return Position(self._sources[number, move.shard], row * columns + column, columns)

    def _in_stored(self, number: int, move: Move) -> Position:
        (row, column), columns = move.to, self._rank_plan.stored[number].columns
        return Position(number, row * columns + column, columns)

    def _in_buffer(self, start: int, move: Move) -> Position:
        """start: first byte."""
        return Position(0, start // self.dtype.itemsize, move.box.columns)


class ShardReader:
    """Reads the shards of this rank in order, each when it is first needed, until its last use."""

    def __init__(self, tensors: Iterable[torch.Tensor], plan: RankPlan):
        self._plan = plan
        self._tensors = iter(tensors)
        self._unread = iter(plan.shards)
        self._in_use: dict[Key, torch.Tensor] = {}

    def read(self, number: int) -> list[torch.Tensor]:
        """The shards that a bucket reads, in the order of its keys. Buckets are read in order."""
        keys = self._plan.buckets[number].keys
        while any(key not in self._in_use for key in keys):
            self._read_next()
        shards = [self._in_use[key] for key in keys]
        for key in keys:
            if self._plan.last_use[key] <= number:
                del self._in_use[key]
        return shards

    def _read_next(self) -> None:
        key, tensor = next(self._unread), next(self._tensors)
        box = self._plan.shards[key].box
        if tensor.numel() != box.numel:
            name = self._plan.names[key[0]]
            raise ValueError(f"weight sync: the shard of {name} has {tensor.numel()} elements, expected {box}")
        if key in self._plan.last_use:
            self._in_use[key] = tensor.contiguous()

    def finish(self) -> None:
        """Read the rest: reading is collective."""
        for _ in self._unread:
            next(self._tensors)
        if next(self._tensors, None) is not None:
            raise ValueError("weight sync: training yields more shards than its layout has")
