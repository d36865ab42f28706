"""`ReshardSync`: the exchange of one push, and its checks. See the package for the way of a weight."""

import dataclasses
import logging
import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl.weight_sync.base import ReceivesWeights, ShardSource, SlicedWeights, SyncReport, WeightSource, WeightSync
from verl.weight_sync.reshard.chunk_table import TensorList, readable_tensors
from verl.weight_sync.reshard.grouping import HybridGroups
from verl.weight_sync.reshard.plan import Plan, RankLayout, Stored, make_plan
from verl.weight_sync.reshard.rank_plan import RankPlan, ShardReader
from verl.weight_sync.verify import checksums, equal_bits, sums_of

logger = logging.getLogger("verl.rollout")

#: size of the all-to-all that measures the bandwidth
_MEASURED_BYTES = {"cuda": 256 * 2**20, "cpu": 8 * 2**20}


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
        if self.size == 1:
            return
        self.group.allreduce([tensor]).wait()

    def swap(self, numbers: torch.Tensor) -> torch.Tensor:
        """Send row i of (ranks, n) int64 to rank i. Returns the rows that all ranks have sent to this one."""
        received = torch.empty_like(numbers)
        self.group.alltoall_base(received, numbers, [], []).wait()
        return received

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


class _Exchange:
    """The buffers of one push, and checksums of what this rank sends to and receives from each other rank.

    Two buckets are in memory: while one is sent, the next one is packed and the one before is stored.
    """

    def __init__(self, peers: Peers, plan: RankPlan, stored: Sequence[torch.Tensor]):
        self.peers, self.plan = peers, plan
        self._targets = TensorList(stored, peers.device)
        self._slots = [torch.empty(size, dtype=torch.uint8, device=peers.device) for size in plan.slot_bytes]
        self._works: dict[int, Any] = {}
        self._cells: tuple[list[int], list[int]] = [], []  # sent and received: rank * buckets + bucket
        self._sums: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def start(self, number: int, shards: Sequence[torch.Tensor]) -> None:
        """Start to send a bucket, and copy what this rank keeps."""
        bucket, (sent, received, buffer) = self.plan.buckets[number], self._buffer(number)
        sources = readable_tensors(shards, self.peers.device, bucket.dtype)
        bucket.sends.copy(sources, buffer)
        if self.peers.size > 1:
            self._works[number] = self.peers.start_exchange(received, sent, bucket.received, bucket.sent)
        self._add_sums(number, sent, bucket.sent, is_received=False)
        bucket.keeps.copy(sources, self._targets)

    def finish(self, number: int) -> None:
        """Wait for a bucket, and copy what has arrived to where it is stored."""
        if number not in self._works:
            return
        bucket, (_, received, buffer) = self.plan.buckets[number], self._buffer(number)
        self._works.pop(number).wait()
        self._add_sums(number, received, bucket.received, is_received=True)
        bucket.receives.copy(buffer, self._targets)

    def _buffer(self, number: int) -> tuple[torch.Tensor, torch.Tensor, TensorList]:
        """What a bucket sends, what it receives, and the buffer of both."""
        bucket, slot = self.plan.buckets[number], self._slots[number % 2]
        end = sum(bucket.sent)
        return slot[:end], slot[end : bucket.bytes], TensorList([slot.view(bucket.dtype)], self.peers.device)

    def _add_sums(self, number: int, content: torch.Tensor, sizes: Sequence[int], is_received: bool) -> None:
        """content: (bytes,) uint8, sizes[i] of them to or from rank i."""
        for rank, segment in enumerate(content.split(list(sizes))):
            if len(segment):
                self._cells[is_received].append(rank * len(self.plan.buckets) + number)
                self._sums[is_received].append(sums_of(segment))

    def corrupted(self) -> list[str]:
        """The buckets that have not arrived at this rank as they were sent. Collective."""
        if self.peers.size == 1 or not self.plan.buckets:
            return []
        sent, received = (self._checksums(cells, sums) for cells, sums in zip(self._cells, self._sums))
        differing = (self.peers.swap(sent) != received).nonzero().tolist()
        return [f"bucket {number} from rank {rank} to rank {self.peers.rank}" for rank, number in differing]

    def _checksums(self, cells: list[int], sums: list[torch.Tensor]) -> torch.Tensor:
        """(ranks, buckets) int64; 0 where nothing is sent."""
        table = torch.zeros(self.peers.size, len(self.plan.buckets), dtype=torch.int64, device=self.peers.device)
        if cells:
            table.view(-1)[torch.tensor(cells, device=table.device)] = checksums(sums)
        return table


class ReshardSync(WeightSync):
    """Every rank gets the slices of the parameters that it stores, from the shards of all ranks.

    Args:
        rollout: the rollout engine; its receiver is a `SlicedWeights`.
        device: of the weights.
        bucket_bytes: max bytes that a rank sends, keeps and receives in one bucket; two are in memory.
        group: the process group of the ranks; None: all.
        grouping: which ranks generate together; None: not known.
        check_every: see `WeightSync`. A comparison gathers all parameters.
    """

    def __init__(
        self,
        rollout: ReceivesWeights,
        device: torch.device,
        bucket_bytes: int,
        group: Any = None,
        grouping: HybridGroups | None = None,
        check_every: int = 1,
    ):
        super().__init__(check_every)
        self.rollout = rollout
        self.grouping = grouping
        self.peers = Peers(group, device)
        self.bucket_bytes = bucket_bytes
        self.bandwidth: float | None = None
        self._plan: RankPlan | None = None
        self._planned: tuple[object, object] = (None, None)  # the layouts of the plan

    def _push(self, engine: WeightSource, version: int, compares: bool) -> SyncReport:
        assert isinstance(engine, ShardSource)
        receiver = self.rollout.receiver()
        assert isinstance(receiver, SlicedWeights)
        if self.bandwidth is None:
            self.bandwidth = self.peers.bandwidth()
        start = time.perf_counter()
        plan = self._current_plan(engine, receiver)
        with torch.no_grad(), receiver.open_slices(version) as slices:
            stored = [slices[name] for name in plan.names]
            for name, tensor, layout in zip(plan.names, stored, plan.stored):
                _check_stored(name, tensor, layout)
            corrupted = self._transfer(plan, ShardReader(engine.shards(), plan), stored)
            self._raise_on_all_ranks(f"weights of version {version} were corrupted in transit", corrupted)
            if compares:
                differing = self._differing(plan, engine, stored)
                problem = f"weights of version {version} were not loaded: {{}} slices differ from the training shards"
                self._raise_on_all_ranks(problem, differing)
        self.rollout.weight_version = version
        received, kept = plan.plan.received[plan.rank], plan.plan.kept[plan.rank]
        if self.peers.size == 1:  # copied on the device, as by `replica`
            received, kept = kept, 0
        return SyncReport(version, received, time.perf_counter() - start, 0, self.bandwidth, kept)

    def _current_plan(self, engine: ShardSource, receiver: SlicedWeights) -> RankPlan:
        """The plan, which is computed again if a layout has been replaced. Collective."""
        shards, stored = engine.shard_layout(), receiver.slice_layout()
        if self._plan is None or self._planned[0] is not shards or self._planned[1] is not stored:
            layout = RankLayout(tuple(shards), stored, engine.replicas)
            plan = make_plan(self.peers.gather(layout), self.bucket_bytes)
            if self.peers.rank == 0:
                logger.info("weight sync: %s", _describe(plan, self.grouping))
            self._plan, self._planned = RankPlan(plan, self.peers.rank, layout, self.peers.device), (shards, stored)
        return self._plan

    def _transfer(self, plan: RankPlan, shards: ShardReader, stored: Sequence[torch.Tensor]) -> list[str]:
        """Send, receive and store all buckets. Returns those that have not arrived at this rank as they were sent."""
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
        return exchange.corrupted()

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
    """Check that a tensor is what the layout says: chunks are written by their positions in it.

    Raises:
        ValueError: it is not.
    """
    size = layout.rows * layout.columns
    if not tensor.is_contiguous() or tensor.dtype != layout.dtype or tensor.numel() != size:
        actual = f"{'' if tensor.is_contiguous() else 'not contiguous, '}{tensor.numel()} elements of {tensor.dtype}"
        raise ValueError(
            f"weight sync: {name}: expected {size} contiguous elements of {layout.dtype} in the rollout, found {actual}"
        )


def _describe(plan: Plan, grouping: HybridGroups | None) -> str:
    """What a push sends, in comparison with the formulas of HybridFlow."""
    worst, total = max(range(plan.ranks), key=lambda rank: plan.received[rank]), plan.model_bytes
    summary = (
        f"reshard of {total / 1e9:.3g} GB: a rank receives at most {plan.received[worst] / total:.1%} of the weights"
        f" ({plan.received[worst] / 1e9:.3g} GB) and has {plan.kept[worst] / total:.1%} already"
    )
    if grouping is None:
        return summary
    sizes = f"p={grouping.pp}, t={grouping.tp} -> t_g={grouping.generation_tp}"
    ours, vanilla = (groups.volumes() for groups in (grouping, dataclasses.replace(grouping, strided=False)))
    return (
        f"{summary}; of evenly divided layers with {sizes} (arXiv 2409.19256, table 2): "
        f"{float(ours.communication):.1%}, and {float(vanilla.communication):.1%} if all weights are gathered"
    )
