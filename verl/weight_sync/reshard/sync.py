"""`ReshardSync`: one rank's share of the plan, the exchange of one push, and its checks. See the package for the way of
a weight."""

import logging
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl.utils.shards import Box, Shard
from verl.weight_sync.base import ReceivesWeights, ShardSource, SlicedWeights, SyncReport, WeightSource, WeightSync
from verl.weight_sync.reshard.plan import Bucket, Move, Plan, RankLayout, Stored, buffer_bytes, make_plan
from verl.weight_sync.verify import equal_bits

logger = logging.getLogger("verl.rollout")

# ---- copies of rectangles -----------------------------------------------------------------------------------------


class Position(NamedTuple):
    """Where a chunk begins in a tensor."""

    tensor: int  # index in the sources or targets of `ChunkTable.copy`
    start: int  # first element
    stride: int  # elements from a row to the next one

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


# ---- the share of a rank -------------------------------------------------------------------------------------------

#: (number of the parameter, index of the shard among those that this rank has of it)
Key = tuple[int, int]


class RankPlan:
    """The share of one rank in a plan. Parameters have the numbers that they have there."""

    def __init__(self, plan: Plan, rank: int, layout: RankLayout):
        self.plan, self.rank = plan, rank
        self.names = [parameter.name for parameter in plan.parameters]
        self.stored: list[Stored] = [layout.stored[name] for name in self.names]  # of this rank
        self.shards: dict[Key, Shard] = {}  # that this rank has, in the order of reading
        count = dict.fromkeys(self.names, 0)
        numbers = {name: number for number, name in enumerate(self.names)}
        for shard in layout.shards:
            self.shards[numbers[shard.name], count[shard.name]] = shard
            count[shard.name] += 1
        self.buckets = [RankBucket(bucket, self) for bucket in plan.buckets]
        # the last bucket that reads a shard; shards that no bucket reads are not in it
        self.last_use = {key: number for number, bucket in enumerate(self.buckets) for key in bucket.keys}
        sizes = [bucket.bytes for bucket in self.buckets]
        self.slot_bytes = [max(sizes[parity::2], default=0) for parity in (0, 1)]  # consecutive buckets alternate


class RankBucket:
    """The share of one rank in a bucket. Its buffer has the chunks that it sends, by rank, then those it receives."""

    def __init__(self, bucket: Bucket, rank_plan: RankPlan):
        self.dtype, self._rank_plan = bucket.dtype, rank_plan
        moves, rank = bucket.moves, rank_plan.rank
        kept = [(number, move) for number, move in moves if move.source == rank == move.target]
        outgoing = [(number, move) for number, move in moves if move.source == rank != move.target]
        incoming = [(number, move) for number, move in moves if move.target == rank != move.source]
        outgoing.sort(key=lambda entry: entry[1].target)
        incoming.sort(key=lambda entry: entry[1].source)
        # of the shards that it reads
        self.keys: list[Key] = list(dict.fromkeys((number, move.shard) for number, move in (*outgoing, *kept)))
        self._sources = {key: source for source, key in enumerate(self.keys)}
        # copies from shards to the buffer, from shards to stored tensors, and from the buffer to these
        self.sends, self.keeps, self.receives = (ChunkTable() for _ in range(3))
        # bytes to and from each rank
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
            key, tensor = next(self._unread), next(self._tensors)
            box = self._plan.shards[key].box
            if tensor.numel() != box.numel:
                name = self._plan.names[key[0]]
                raise ValueError(f"weight sync: the shard of {name} has {tensor.numel()} elements, expected {box}")
            if key in self._plan.last_use:
                self._in_use[key] = tensor.contiguous()
        shards = [self._in_use[key] for key in keys]
        for key in keys:
            if self._plan.last_use[key] <= number:
                del self._in_use[key]
        return shards

    def finish(self) -> None:
        """Read the rest: reading is collective."""
        for _ in self._unread:
            next(self._tensors)
        if next(self._tensors, None) is not None:
            raise ValueError("weight sync: training yields more shards than its layout has")


class Peers:
    """The ranks of a reshard.

    Args:
        group: their process group; None: all ranks, or this process if torch.distributed is not initialized.
        device: of the weights.
    """

    def __init__(self, group: Any, device: torch.device):
        self.group = dist.group.WORLD if group is None and dist.is_initialized() else group
        self.device = device
        self.rank, self.size = (0, 1) if self.group is None else (self.group.rank(), self.group.size())

    def start_exchange(self, received: torch.Tensor, sent: torch.Tensor, counts: list[int], sizes: list[int]) -> Any:
        """Start an all-to-all of bytes: sizes[i] to rank i, and counts[i] from it."""
        return self.group.alltoall_base(received, sent, counts, sizes)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.size > 1:
            self.group.allreduce([tensor]).wait()

    def gather(self, value: object) -> list[Any]:
        """The objects of all ranks, through host memory."""
        if self.size == 1:
            return [value]
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self.group.allgather([sizes], [torch.tensor([len(content)])]).wait()
        longest = max(int(size) for size in sizes)
        contents = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.nn.functional.pad(content, (0, longest - len(content)))
        self.group.allgather([contents], [padded]).wait()
        return [pickle.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(contents, sizes)]


class _Exchange:
    """The buffers of one push.

    Two buckets are in memory: while one is sent, the next one is packed and the one before is stored.
    """

    def __init__(self, peers: Peers, plan: RankPlan, stored: Sequence[torch.Tensor]):
        self.peers, self.plan = peers, plan
        self._targets = stored
        self._slots = [torch.empty(size, dtype=torch.uint8, device=peers.device) for size in plan.slot_bytes]
        self._works: dict[int, Any] = {}

    def start(self, number: int, shards: Sequence[torch.Tensor]) -> None:
        """Start to send a bucket, and copy what this rank keeps."""
        bucket, (sent, received, buffer) = self.plan.buckets[number], self._buffer(number)
        sources = [shard.to(self.peers.device) for shard in shards]
        bucket.sends.copy(sources, buffer)
        if self.peers.size > 1:
            self._works[number] = self.peers.start_exchange(received, sent, bucket.received, bucket.sent)
        bucket.keeps.copy(sources, self._targets)

    def finish(self, number: int) -> None:
        """Wait for a bucket, and copy what has arrived to where it is stored."""
        if number not in self._works:
            return
        self._works.pop(number).wait()
        self.plan.buckets[number].receives.copy(self._buffer(number)[2], self._targets)

    def _buffer(self, number: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """What a bucket sends, what it receives, and the buffer of both."""
        bucket, slot = self.plan.buckets[number], self._slots[number % 2]
        end = sum(bucket.sent)
        return slot[:end], slot[end : bucket.bytes], [slot.view(bucket.dtype)]


class ReshardSync(WeightSync):
    """Every rank gets the slices of the parameters that it stores, from the shards of all ranks.

    Args:
        rollout: the rollout engine; its receiver is a `SlicedWeights`.
        bucket_bytes: max bytes that a rank sends, keeps and receives in one bucket; two are in memory.
        check_every: see `WeightSync`. A comparison gathers all parameters.
    """

    def __init__(
        self, rollout: ReceivesWeights, device: torch.device, bucket_bytes: int, group: Any = None, check_every: int = 1
    ):
        super().__init__(check_every)
        self.rollout = rollout
        self.peers = Peers(group, device)
        self.bucket_bytes = bucket_bytes
        self._plan: RankPlan | None = None
        self._planned: tuple[object, object] = (None, None)  # the layouts of the plan

    def _push(self, engine: WeightSource, version: int, compares: bool) -> SyncReport:
        assert isinstance(engine, ShardSource)
        receiver = self.rollout.receiver()
        assert isinstance(receiver, SlicedWeights)
        plan = self._current_plan(engine, receiver)
        with torch.no_grad(), receiver.open_slices(version) as slices:
            stored = [slices[name] for name in plan.names]
            for name, tensor, layout in zip(plan.names, stored, plan.stored):
                _check_stored(name, tensor, layout)
            self._transfer(plan, ShardReader(engine.shards(), plan), stored)
            if compares:
                differing = self._differing(plan, engine, stored)
                problem = f"weights of version {version} were not loaded: {{}} slices differ from the training shards"
                self._raise_on_all_ranks(problem, differing)
        self.rollout.weight_version = version
        received, kept = plan.plan.received[plan.rank], plan.plan.kept[plan.rank]
        if self.peers.size == 1:  # copied on the device, as by `replica`
            received, kept = kept, 0
        return SyncReport(version, received, kept=kept)

    def _current_plan(self, engine: ShardSource, receiver: SlicedWeights) -> RankPlan:
        """The plan, which is computed again if a layout has been replaced. Collective."""
        shards, stored = engine.shard_layout(), receiver.slice_layout()
        if self._plan is None or self._planned[0] is not shards or self._planned[1] is not stored:
            layout = RankLayout(tuple(shards), stored, engine.replicas)
            plan = make_plan(self.peers.gather(layout), self.bucket_bytes)
            if self.peers.rank == 0:
                logger.info("weight sync: %s", _describe(plan))
            self._plan, self._planned = RankPlan(plan, self.peers.rank, layout), (shards, stored)
        return self._plan

    def _transfer(self, plan: RankPlan, shards: ShardReader, stored: Sequence[torch.Tensor]) -> None:
        """Send, receive and store all buckets."""
        for tensor, layout in zip(stored, plan.stored):
            if not layout.chunks:
                tensor.zero_()
        exchange, count = _Exchange(self.peers, plan, stored), len(plan.buckets)
        for number in range(count):
            exchange.start(number, shards.read(number))
            if number > 0:
                exchange.finish(number - 1)
        exchange.finish(count - 1)
        shards.finish()

    def _differing(self, plan: RankPlan, engine: ShardSource, stored: Sequence[torch.Tensor]) -> list[str]:
        """Gather all parameters. Returns the slices of this rank whose bits differ from them. Collective."""
        layouts = {name: (layout, tensor) for name, layout, tensor in zip(plan.names, plan.stored, stored)}
        dtypes = {layout.dtype for layout in plan.stored}
        differing = []
        for name, full in engine.rollout_weights(dtypes.pop() if len(dtypes) == 1 else None):
            layout, tensor = layouts.pop(name)
            if not equal_bits(layout.cut(full.to(tensor.device)), tensor):
                differing.append(f"{name} on rank {plan.rank}")
        assert not layouts, layouts.keys()
        return differing

    def _raise_on_all_ranks(self, problem: str, details: list[str]) -> None:
        """Raise ValueError on every rank if one of them has details of a problem. Collective."""
        count = torch.tensor(len(details), device=self.peers.device)
        self.peers.sum(count)
        if count:
            every = [each for rank_details in self.peers.gather(details) for each in rank_details]
            raise ValueError(f"{problem.format(len(every))}: {', '.join(every[:3])}")


def _check_stored(name: str, tensor: torch.Tensor, layout: Stored) -> None:
    """Raise ValueError if a tensor is not what the layout says: chunks are written by their positions in it."""
    size = layout.rows * layout.columns
    if not tensor.is_contiguous() or tensor.dtype != layout.dtype or tensor.numel() != size:
        actual = f"{'' if tensor.is_contiguous() else 'not contiguous, '}{tensor.numel()} elements of {tensor.dtype}"
        raise ValueError(
            f"weight sync: {name}: expected {size} contiguous elements of {layout.dtype} in the rollout, found {actual}"
        )


def _describe(plan: Plan) -> str:
    """What a push sends."""
    worst, total = max(range(plan.ranks), key=lambda rank: plan.received[rank]), plan.model_bytes
    return (
        f"reshard of {total / 1e9:.3g} GB: a rank receives at most {plan.received[worst] / total:.1%} of the weights"
        f" ({plan.received[worst] / 1e9:.3g} GB) and has {plan.kept[worst] / total:.1%} already"
    )
