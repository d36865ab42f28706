"""`reshard`: every rank receives the chunks of the parameters that it stores, and no others.

Training and rollout share the devices, and every rank stores slices of the parameters, as with tensor parallelism.
The plan is computed at the first push. A bucket is one all-to-all of the chunks of many parameters; the next one is
packed while it is sent. Chunks that a rank has already are copied.

Every push is verified: the position sums of all chunks that a rank was to get, computed by their senders, must be those
of what it stores.
"""

import dataclasses
import logging
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl.rollout.base import RolloutEngine
from verl.rollout.weight_sync.base import ShardSource, SlicedWeights, SyncReport, WeightSource, WeightSync
from verl.rollout.weight_sync.checksums import combine
from verl.rollout.weight_sync.grouping import HybridGroups
from verl.rollout.weight_sync.plan import Bucket, Move, Plan, RankLayout, make_plan, room
from verl.rollout.weight_sync.position_sums import PositionSums, Summed
from verl.utils.shards import Box, Shard

logger = logging.getLogger("verl.rollout")

#: size of the all-to-all that measures the bandwidth
_MEASURED_BYTES = {"cuda": 256 * 2**20, "cpu": 8 * 2**20}


class Peers:
    """The ranks of a reshard.

    Args:
        group: their process group; None: all ranks.
        device: of the weights.
    """

    def __init__(self, group: Any, device: torch.device):
        self.group = dist.group.WORLD if group is None else group
        self.device = device
        self.rank, self.size = self.group.rank(), self.group.size()

    def start_exchange(self, received: torch.Tensor, sent: torch.Tensor, counts: list[int], sizes: list[int]) -> Any:
        """Start an all-to-all of bytes: sizes[i] to rank i, and counts[i] from it."""
        return self.group.alltoall_base(received, sent, counts, sizes)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        self.group.allreduce([tensor]).wait()

    def gather(self, value: object) -> list[Any]:
        """The objects of all ranks, through host memory."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self.group.allgather([sizes], [torch.tensor([len(content)])]).wait()
        most = max(int(size) for size in sizes)
        found = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.nn.functional.pad(content, (0, most - len(content)))
        self.group.allgather([found], [padded]).wait()
        return [pickle.loads(other[: int(size)].numpy().tobytes()) for other, size in zip(found, sizes)]

    def bandwidth(self) -> float:
        """Bytes per second that a rank receives in an all-to-all: the best of three. Collective."""
        if self.size == 1:
            return 0.0
        share = _MEASURED_BYTES.get(self.device.type, _MEASURED_BYTES["cpu"]) // (self.size - 1)
        sizes = [0 if rank == self.rank else share for rank in range(self.size)]
        sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        received, seconds = torch.empty_like(sent), []
        for _ in range(4):  # the first one connects
            self.gather(None)
            start = time.perf_counter()
            self.start_exchange(received, sent, sizes, sizes).wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return len(sent) / min(seconds[1:])


@dataclass(frozen=True)
class _Copy:
    """One chunk in a buffer, and where it is in a tensor: a shard that it is read from, or a stored tensor.

    Attributes:
        key: (parameter, index of the shard), or (parameter, -1) of a stored tensor.
        start: first element in the buffer.
        at: first element in the tensor.
        shape, stride: in the tensor; a contiguous chunk has one dimension.
    """

    key: tuple[int, int]
    start: int
    at: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The chunk of the tensor, which is contiguous."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.at)

    def in_buffer(self, buffer: torch.Tensor, offset: int) -> torch.Tensor:
        """The chunk in the buffer. offset: of the buffer in its storage."""
        stride = (1,) if len(self.shape) == 1 else (self.shape[1], 1)
        return buffer.as_strided(self.shape, stride, offset + self.start)


def _copy_of(key: tuple[int, int], box: Box, at: tuple[int, int], columns: int, start: int) -> _Copy:
    """at: row and column in a tensor with so many columns. start: first element in the buffer."""
    first = at[0] * columns + at[1]
    if box.columns == columns:
        return _Copy(key, start, first, (box.numel,), (1,))
    return _Copy(key, start, first, (box.rows, box.columns), (columns, 1))


class _Own:
    """What this rank has in training and stores, by the numbers of the parameters in the plan."""

    def __init__(self, rank: int, layout: RankLayout, plan: Plan):
        self.rank = rank
        numbers = {parameter.name: index for index, parameter in enumerate(plan.parameters)}
        self.stored = [layout.stored[parameter.name] for parameter in plan.parameters]
        self.names = [parameter.name for parameter in plan.parameters]
        self.keys: list[tuple[int, int]] = []  # (parameter, index of the shard), in the order of reading
        self.shards: dict[tuple[int, int], Shard] = {}
        count = [0] * len(numbers)
        for shard in layout.shards:
            index = numbers[shard.name]
            self.keys.append((index, count[index]))
            self.shards[self.keys[-1]] = shard
            count[index] += 1


class _RankBucket:
    """The share of one rank in a bucket: what it reads from its shards, sends, receives and stores.

    A buffer has the chunks for the other ranks, by rank, then those that this rank keeps.

    Attributes:
        reads: chunks of shards, and where they are in the buffer of what is sent.
        kept: those of them that this rank stores itself.
        stores: chunks that are received, and where they are in the buffer of what is received.
        sums: of all reads, by target, whether the target is the first one that needs the chunk, and parameter.
        sent, received: bytes to and from each rank.
        bytes: of the buffer of what is sent and kept.
    """

    def __init__(self, bucket: Bucket, plan: Plan, own: _Own, device: torch.device):
        self.dtype, rank = bucket.dtype, own.rank
        self.reads: list[_Copy] = []
        self.kept: list[_Copy] = []
        self.stores: list[_Copy] = []
        self.sums = PositionSums(2 * plan.ranks * len(plan.parameters), device)
        self.sent, self.received = [0] * plan.ranks, [0] * plan.ranks
        outgoing: list[list[tuple[int, Move]]] = [[] for _ in range(plan.ranks)]
        incoming: list[list[tuple[int, Move]]] = [[] for _ in range(plan.ranks)]
        for index, move in bucket.moves:
            if move.source == rank:
                outgoing[move.target].append((index, move))
            elif move.target == rank:
                incoming[move.source].append((index, move))
        at, size = 0, self.dtype.itemsize
        for other in (*(other for other in range(plan.ranks) if other != rank), rank):
            before = at
            for index, move in outgoing[other]:
                columns = own.shards[index, move.shard].box.columns
                self.reads.append(_copy_of((index, move.shard), move.box, move.at, columns, at // size))
                if other == rank:
                    self.kept.append(_copy_of((index, -1), move.box, move.to, own.stored[index].columns, at // size))
                self._add_sums(index, move, plan, at)
                at += room(move, self.dtype)
            self.sent[other] = 0 if other == rank else at - before
        self.bytes, at = at, 0
        for other, moves in enumerate(incoming):
            before = at
            for index, move in moves:
                self.stores.append(_copy_of((index, -1), move.box, move.to, own.stored[index].columns, at // size))
                at += room(move, self.dtype)
            self.received[other] = at - before

    def _add_sums(self, index: int, move: Move, plan: Plan, start: int) -> None:
        parameter, box = plan.parameters[index], move.box
        per_word = parameter.word // self.dtype.itemsize
        columns, cell = box.columns // per_word, (2 * move.target + move.first) * len(plan.parameters) + index
        self.sums.add(Summed(0, start, box.rows, columns, parameter.word, 1), [(box.top, box.rows, cell)])
        if parameter.split_columns:
            of_columns = Summed(0, start, box.rows, columns, parameter.word, 0)
            self.sums.add(of_columns, [(box.left // per_word, columns, cell)])


def _sums_of_stored(plan: Plan, own: _Own, device: torch.device) -> PositionSums:
    """The sums of what this rank stores of every parameter."""
    sums = PositionSums(len(plan.parameters), device)
    for index, (parameter, stored) in enumerate(zip(plan.parameters, own.stored)):
        per_word = parameter.word // parameter.dtype.itemsize
        columns = stored.columns // per_word
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
        for dim in (1, 0) if parameter.split_columns else (1,):
            sums.add(Summed(index, 0, stored.rows, columns, parameter.word, dim), ranges[dim])
    return sums


class _RankPlan:
    """The plan of this rank, with what is computed once: copies, sizes and factors of sums."""

    def __init__(self, plan: Plan, rank: int, layout: RankLayout, device: torch.device):
        self.plan = plan
        self.own = _Own(rank, layout, plan)
        self.buckets = [_RankBucket(bucket, plan, self.own, device) for bucket in plan.buckets]
        self.stored_sums = _sums_of_stored(plan, self.own, device)
        self.last_use = {copy.key: number for number, bucket in enumerate(self.buckets) for copy in bucket.reads}
        self.zeros = [index for index, stored in enumerate(self.own.stored) if not stored.chunks]
        self.sizes = [
            max((bucket.bytes + sum(bucket.received) for bucket in self.buckets[parity::2]), default=0)
            for parity in (0, 1)
        ]


class _Shards:
    """Reads the shards of this rank in order, each when it is first needed, until its last use."""

    def __init__(self, tensors: Iterator[torch.Tensor], plan: _RankPlan):
        self.plan = plan
        self._tensors = tensors
        self._keys = iter(plan.own.keys)
        self._read: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, number: int) -> dict[tuple[int, int], torch.Tensor]:
        """The shards that a bucket reads. Buckets are read in order."""
        last_use = self.plan.last_use
        found = {}
        for copy in self.plan.buckets[number].reads:
            while copy.key not in self._read:
                self._next()
            found[copy.key] = self._read[copy.key]
        for key in [key for key in self._read if last_use[key] <= number]:
            del self._read[key]
        return found

    def _next(self) -> None:
        key, tensor = next(self._keys), next(self._tensors)
        box = self.plan.own.shards[key].box
        if tensor.numel() != box.numel:
            raise ValueError(
                f"weight sync: the shard of {self.plan.own.names[key[0]]} has {tensor.numel()} elements, expected {box}"
            )
        if key in self.plan.last_use:
            self._read[key] = tensor.contiguous()

    def finish(self) -> None:
        """Read the rest: reading is collective."""
        for _ in self._keys:
            next(self._tensors)
        if next(self._tensors, None) is not None:
            raise ValueError("weight sync: training yields more shards than its layout has")


class ReshardSync(WeightSync):
    """Every rank gets the slices of the parameters that it stores, from the shards of all ranks.

    Args:
        rollout: the rollout engine; its receiver is a `SlicedWeights`.
        device: of the weights.
        bucket_bytes: max bytes that a rank sends, keeps and receives in one bucket; two are in memory.
        group: the process group of the ranks; None: all.
        grouping: which ranks generate together; None: not known.
    """

    def __init__(
        self,
        rollout: RolloutEngine,
        device: torch.device,
        bucket_bytes: int,
        group: Any = None,
        grouping: HybridGroups | None = None,
    ):
        self.rollout = rollout
        self.grouping = grouping
        self.peers = Peers(group, device)
        self.bucket_bytes = bucket_bytes
        self.bandwidth: float | None = None
        self._plan: _RankPlan | None = None
        self._planned: tuple[object, object] = (None, None)  # the layouts of the plan

    def push(self, engine: WeightSource, version: int) -> SyncReport:
        """See `WeightSync.push`.

        Raises:
            ValueError: the layouts do not fit each other, or a rank stores other values than training has.
        """
        assert isinstance(engine, ShardSource)
        receiver = self.rollout.receiver()
        assert isinstance(receiver, SlicedWeights)
        if self.bandwidth is None:
            self.bandwidth = self.peers.bandwidth()
        start = time.perf_counter()
        plan = self._plan_of(engine, receiver)
        with torch.no_grad():
            stored = receiver.open_slices()
            own = [stored[name] for name in plan.own.names]
            if scattered := [name for name, tensor in zip(plan.own.names, own) if not tensor.is_contiguous()]:
                raise ValueError(f"weight sync: expected contiguous parameters in the rollout, found {scattered[:3]}")
            sums = self._transfer(plan, _Shards(engine.shards(), plan), own)
            checksum = self._verify(plan, own, sums, version)
        receiver.close_slices()
        self.rollout.weight_version = version
        total, rank = plan.plan, self.peers.rank
        seconds = time.perf_counter() - start
        return SyncReport(version, total.received[rank], seconds, checksum, self.bandwidth, total.kept[rank])

    def _plan_of(self, engine: ShardSource, receiver: SlicedWeights) -> _RankPlan:
        """The plan, which is made again if a layout has been replaced. Collective."""
        shards, stored = engine.shard_layout(), receiver.slice_layout()
        if self._plan is None or self._planned[0] is not shards or self._planned[1] is not stored:
            own = RankLayout(tuple(shards), stored, engine.replicas)
            plan = make_plan(self.peers.gather(own), self.bucket_bytes)
            if self.peers.rank == 0:
                logger.info("weight sync: %s", _describe(plan, self.grouping))
            self._plan, self._planned = _RankPlan(plan, self.peers.rank, own, self.peers.device), (shards, stored)
        return self._plan

    def _transfer(self, plan: _RankPlan, shards: _Shards, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Send, receive and store all buckets. Returns the sums of what was sent."""
        sums = torch.zeros(2 * plan.plan.ranks * len(stored), dtype=torch.int64, device=self.peers.device)
        for index in plan.zeros:
            stored[index].zero_()
        slots = [torch.empty(size, dtype=torch.uint8, device=self.peers.device) for size in plan.sizes]
        ahead = None
        for number, bucket in enumerate(plan.buckets):
            started = self._start(bucket, shards.of(number), slots[number % 2])
            sums += bucket.sums.of([started[0]])
            if ahead is not None:
                self._store(*ahead, stored)
            ahead = bucket, *started
        if ahead is not None:
            self._store(*ahead, stored)
        shards.finish()
        return sums

    def _start(
        self, bucket: _RankBucket, shards: dict[tuple[int, int], torch.Tensor], slot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Pack a bucket and start to exchange it. Returns what is sent and kept, what is received, and the work."""
        packed, received = slot[: bucket.bytes], slot[bucket.bytes : bucket.bytes + sum(bucket.received)]
        buffer = packed.view(bucket.dtype)
        offset = buffer.storage_offset()
        chunks = [copy.of(shards[copy.key]) for copy in bucket.reads]
        _copy([copy.in_buffer(buffer, offset) for copy in bucket.reads], chunks)
        if self.peers.size == 1:
            return packed, received, None
        sent = packed[: sum(bucket.sent)]
        return packed, received, self.peers.start_exchange(received, sent, bucket.received, bucket.sent)

    def _store(
        self,
        bucket: _RankBucket,
        packed: torch.Tensor,
        received: torch.Tensor,
        work: Any,
        stored: Sequence[torch.Tensor],
    ) -> None:
        """Copy what this rank keeps and receives to where it is stored."""
        for copies, content in ((bucket.kept, packed), (bucket.stores, received)):
            if content is received and work is not None:
                work.wait()
            buffer = content.view(bucket.dtype)
            offset = buffer.storage_offset()
            chunks = [copy.in_buffer(buffer, offset) for copy in copies]
            _copy([copy.of(stored[copy.key[0]]) for copy in copies], chunks)

    def _verify(self, plan: _RankPlan, stored: Sequence[torch.Tensor], sums: torch.Tensor, version: int) -> int:
        """Compare what every rank stores with what was sent to it. Collective. Returns the checksum of the push."""
        names, ranks = plan.own.names, plan.plan.ranks
        by_target = sums.view(ranks, 2, len(names))
        every = torch.cat([by_target.sum(1), by_target[:, 1].sum(0, keepdim=True)])
        every[self.peers.rank] -= plan.stored_sums.of(stored)
        self.peers.sum(every)
        every = every.cpu()
        if wrong := every[:-1].nonzero().tolist():
            found = [f"{names[index]} on rank {rank}" for rank, index in wrong[:3]]
            raise ValueError(
                f"weights of version {version} were not loaded: {len(wrong)} slices differ from the training shards: "
                f"{', '.join(found)}"
            )
        return combine([every[-1]])


def _describe(plan: Plan, grouping: HybridGroups | None) -> str:
    """What a push sends, in comparison with the formulas of HybridFlow."""
    worst, total = max(range(plan.ranks), key=lambda rank: plan.received[rank]), plan.model_bytes
    found = (
        f"reshard of {total / 1e9:.3g} GB: a rank receives at most {plan.received[worst] / total:.1%} of the weights"
        f" ({plan.received[worst] / 1e9:.3g} GB) and has {plan.kept[worst] / total:.1%} already"
    )
    if grouping is None:
        return found
    sizes = f"p={grouping.pp}, t={grouping.tp} -> t_g={grouping.generation_tp}"
    ours, vanilla = (each.volumes() for each in (grouping, dataclasses.replace(grouping, strided=False)))
    return (
        f"{found}; of evenly divided layers with {sizes} (arXiv 2409.19256, table 2): "
        f"{float(ours.communication):.1%}, and {float(vanilla.communication):.1%} if all weights are gathered"
    )


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, with a cast. Contiguous ones take one call."""
    flat = [i for i, source in enumerate(sources) if source.ndim == targets[i].ndim == 1]
    if flat:
        torch._foreach_copy_([targets[i] for i in flat], [sources[i] for i in flat])
    for target, source in zip(targets, sources):
        if not (source.ndim == target.ndim == 1):
            target.copy_(source.view_as(target) if source.ndim == 1 else source)
