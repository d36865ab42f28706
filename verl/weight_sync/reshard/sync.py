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
from typing import Any

import torch
import torch.distributed as dist

from verl.weight_sync.base import ReceivesWeights, ShardSource, SlicedWeights, SyncReport, WeightSource, WeightSync
from verl.weight_sync.checksums import combine
from verl.weight_sync.reshard.chunk_table import FusedCopies, is_supported
from verl.weight_sync.reshard.copies import Copies, Key, LocalLayout, Push, RankBucket, TorchCopies
from verl.weight_sync.reshard.grouping import HybridGroups
from verl.weight_sync.reshard.plan import Plan, RankLayout, Stored, make_plan

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

    def gather(self, value: object) -> list[Any]:
        """The objects of all ranks, through host memory."""
        if self.size == 1:
            return [value]
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


class _RankPlan:
    """The plan of this rank, with what is computed once: copies, sizes and factors of sums."""

    def __init__(self, plan: Plan, rank: int, layout: RankLayout, device: torch.device):
        self.plan, self.own = plan, LocalLayout(rank, layout, plan)
        self.buckets = [RankBucket(bucket, self.own) for bucket in plan.buckets]
        kind = FusedCopies if is_supported(device, plan) else TorchCopies
        self.copies: Copies = kind(self.buckets, self.own, device)
        self.last_use = {key: number for number, bucket in enumerate(self.buckets) for key in bucket.keys}
        self.zeros = [index for index, stored in enumerate(self.own.stored) if not stored.chunks]


class _Shards:
    """Reads the shards of this rank in order, each when it is first needed, until its last use."""

    def __init__(self, tensors: Iterator[torch.Tensor], plan: _RankPlan):
        self.plan = plan
        self._tensors = tensors
        self._keys = iter(plan.own.shards)
        self._read: dict[Key, torch.Tensor] = {}

    def of(self, number: int) -> dict[Key, torch.Tensor]:
        """The shards that a bucket reads. Buckets are read in order."""
        found = {}
        for key in self.plan.buckets[number].keys:
            while key not in self._read:
                self._next()
            found[key] = self._read[key]
        for key in found:
            if self.plan.last_use[key] <= number:
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
        rollout: ReceivesWeights,
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
        with torch.no_grad(), receiver.open_slices(version) as stored:
            own = [stored[name] for name in plan.own.names]
            for name, tensor, layout in zip(plan.own.names, own, plan.own.stored):
                _check_stored(name, tensor, layout)
            sums, stored_sums = self._transfer(plan, _Shards(engine.shards(), plan), own)
            checksum = self._verify(plan, stored_sums, sums, version)
        self.rollout.weight_version = version
        seconds, rank = time.perf_counter() - start, self.peers.rank
        received, kept = plan.plan.received[rank], plan.plan.kept[rank]
        if self.peers.size == 1:  # copied on the device, as by `replica`
            received, kept = kept, 0
        return SyncReport(version, received, seconds, checksum, self.bandwidth, kept)

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

    def _transfer(
        self, plan: _RankPlan, shards: _Shards, stored: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send, receive and store all buckets. Returns the sums of what was sent and kept, and of what is stored."""
        for index in plan.zeros:
            stored[index].zero_()
        push, work = plan.copies.push(stored), None
        for number, bucket in enumerate(plan.buckets):
            sent, received = push.pack(number, shards.of(number))
            previous, work = work, self._start(bucket, sent, received)
            push.keep(number)
            if number > 0:
                self._store(push, number - 1, previous)
        if plan.buckets:
            self._store(push, len(plan.buckets) - 1, work)
        shards.finish()
        return push.sums, push.stored_sums()

    def _start(self, bucket: RankBucket, sent: torch.Tensor, received: torch.Tensor) -> Any:
        if self.peers.size == 1:
            return None
        return self.peers.start_exchange(received, sent, bucket.received, bucket.sent)

    def _store(self, push: Push, number: int, work: Any) -> None:
        if work is not None:
            work.wait()
        push.store(number)

    def _verify(self, plan: _RankPlan, stored: torch.Tensor, sums: torch.Tensor, version: int) -> int:
        """Compare the sums of what every rank stores with those of what was sent to it. Collective. Returns the
        checksum of the push."""
        names, ranks = plan.own.names, plan.plan.ranks
        by_target = sums.view(ranks, 2, len(names))
        every = torch.cat([by_target.sum(1), by_target[:, 1].sum(0, keepdim=True)])
        every[self.peers.rank] -= stored
        self.peers.sum(every)
        every = every.cpu()
        if wrong := every[:-1].nonzero().tolist():
            found = [f"{names[index]} on rank {rank}" for rank, index in wrong[:3]]
            raise ValueError(
                f"weights of version {version} were not loaded: {len(wrong)} slices differ from the training shards: "
                f"{', '.join(found)}"
            )
        return combine([every[-1]])


def _check_stored(name: str, tensor: torch.Tensor, layout: Stored) -> None:
    """Check that a tensor is what the layout says: chunks are written by their positions in it.

    Raises:
        ValueError: it is not.
    """
    size = layout.rows * layout.columns
    if not tensor.is_contiguous() or tensor.dtype != layout.dtype or tensor.numel() != size:
        found = f"{'' if tensor.is_contiguous() else 'not contiguous, '}{tensor.numel()} elements of {tensor.dtype}"
        raise ValueError(
            f"weight sync: {name}: expected {size} contiguous elements of {layout.dtype} in the rollout, found {found}"
        )


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
