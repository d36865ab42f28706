"""`collective`: rollout ranks have their own devices, and training rank 0 broadcasts buckets over torch.distributed.

GPU tensors are sent over NCCL, others over gloo. Three stages overlap: while bucket i is sent, rank 0 gathers and packs
bucket i + 1 and the rollout ranks verify and load bucket i - 1. Each side has two buckets in memory.

A push:

- Rank 0 broadcasts a header (`_Header`).
- Before each bucket, every rank says whether it can continue (`_exchange`), which covers all buckets up to the one
  before the last. So no rank waits for one that has failed. The layout of the bucket follows, or None at the end.
- The checksums follow each bucket and are compared by the rollout ranks before they load it.
- A last exchange confirms that all ranks have loaded everything.
"""

import pickle
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed as dist

from verl.utils.rendezvous import tcp_store, use_interface_to
from verl.weight_sync.base import (
    SyncReport,
    WeightReceiver,
    WeightSource,
    WeightSync,
    describe_error,
)
from verl.weight_sync.buckets import BUCKET_BYTES, Bucket, pack
from verl.weight_sync.verify import (
    COLUMNS,
    ROW_BYTES,
    Loading,
    combine,
    first_differing_row,
    format_checksum,
    sums_of,
)


class TransferGroup:
    """A process group of training rank 0 (rank 0 in this group) and all rollout ranks.

    Args:
        address: host and port on which rank 0 listens.
        rank, size: rank in this group, and its size.
        device: device of the tensors. GPU tensors are sent over NCCL.
        timeout: timeout of a transfer in seconds.

    """

    def __init__(self, address: tuple[str, int], rank: int, size: int, device: torch.device, timeout: float):
        wait = timedelta(seconds=timeout)
        self.rank, self.size, self.device = rank, size, device
        host, port = address
        use_interface_to(host)
        self.store = tcp_store(host, port, size, rank == 0, wait)
        self.control = dist.ProcessGroupGloo(dist.PrefixStore("control", self.store), rank, size, wait)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            torch.cuda.set_device(device)
            self.data = dist.ProcessGroupNCCL(dist.PrefixStore("data", self.store), rank, size, options)
        else:  # a separate group: control messages do not wait for a bucket
            self.data = dist.ProcessGroupGloo(dist.PrefixStore("data", self.store), rank, size, wait)

    def start_broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start to broadcast rank 0's tensor in place, on the group's device."""
        return self.data.broadcast(tensor, 0)

    def broadcast_object(self, value: object) -> object:
        """Broadcast rank 0's object and return it."""
        content = pickle.dumps(value) if self.rank == 0 else b""
        size = torch.tensor([len(content)])
        self.control.broadcast(size, 0).wait()
        tensor = torch.frombuffer(bytearray(content or int(size)), dtype=torch.uint8)
        self.control.broadcast(tensor, 0).wait()
        return pickle.loads(tensor.numpy().tobytes())

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """All-gather: the numbers of all ranks."""
        tensor = torch.tensor(numbers)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self.control.allgather([gathered], [tensor]).wait()
        return [each.tolist() for each in gathered]


_ERROR_BYTES = 2000  # max length of an error message sent to the other ranks


class CollectiveSync(WeightSync):
    """The training side of `collective`, on every training rank. Rollout ranks call `receive_collective`.

    Args:
        group: the group with the rollout ranks; None on training ranks other than 0, which only gather weights.
        dtype: dtype of the sent weights; None: not cast.
        bucket_bytes: max size of a bucket of several parameters.
        check_every: see `WeightSync`.
    """

    def __init__(
        self,
        group: TransferGroup | None,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        check_every: int = 1,
    ):
        super().__init__(check_every)
        self.group = group
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes

    def _push(self, engine: WeightSource, version: int, compares: bool) -> SyncReport:
        weights = engine.rollout_weights(self.dtype)
        if self.group is None:
            for _ in weights:
                pass
            return SyncReport(version)
        size, checksum = _Sending(self, weights).send(_Header(version, self.bucket_bytes, compares))
        return SyncReport(version, size, checksum=checksum)


class _Header(NamedTuple):
    """What rank 0 broadcasts before a push."""

    version: int
    bucket_bytes: int
    compares: bool  # whether rollout ranks compare what they store with what they have received


class _Sending:
    """A push on rank 0."""

    def __init__(self, sync: CollectiveSync, weights: Iterator[tuple[str, torch.Tensor]]):
        self.sync = sync
        self.group: TransferGroup = sync.group
        self.weights = weights
        self.works: dict[int, list[dist.Work]] = {}
        self.sums: list[torch.Tensor] = []

    def send(self, header: _Header) -> tuple[int, int]:
        """Send all buckets. Returns their bytes and checksum."""
        group, sync, size = self.group, self.sync, 0
        group.broadcast_object(header)
        _exchange(group)
        buckets = pack(
            self.weights,
            device=group.device,
            dtype=sync.dtype,
            bucket_bytes=sync.bucket_bytes,
            wait=self._wait,
        )
        try:
            while (ready := self._next(buckets)) is not None:
                bucket, sums = ready
                _exchange(group)
                group.broadcast_object((bucket.entries, len(bucket.content)))
                if len(bucket.content) > sync.bucket_bytes:
                    _exchange(group)  # every rollout rank has memory for it
                self.works[bucket.number] = [group.start_broadcast(bucket.content), group.start_broadcast(sums)]
                size += bucket.bytes
                del bucket, ready
            _exchange(group)
            group.broadcast_object(None)
            _exchange(group)  # all ranks have loaded everything
        except BaseException:
            with suppress(RuntimeError):  # of the group
                self._wait_for_all()
            raise
        self._wait_for_all()
        return size, combine(self.sums)

    def _next(self, buckets: Iterator[Bucket]) -> tuple[Bucket, torch.Tensor] | None:
        """The next bucket and its sums; None at the end. An error is reported to the rollout ranks and raised
        unchanged."""
        try:
            bucket = next(buckets, None)
            if bucket is None:
                return None
            sums = sums_of(bucket.content)
            self.sums.append(sums)
            return bucket, sums
        except BaseException as error:
            with suppress(RuntimeError):  # of the group
                _exchange(self.group, describe_error(error), raises=False)
            raise

    def _wait(self, number: int) -> None:
        for work in self.works.pop(number, ()):
            work.wait()

    def _wait_for_all(self) -> None:
        for number in list(self.works):
            self._wait(number)


def receive_collective(receiver: WeightReceiver, group: TransferGroup, version: int) -> SyncReport:
    """The rollout side of `collective`: receive one push.

    Raises:
        ValueError: a checksum differs (it names the bucket and the first differing parameter), another version arrives
            than expected, another rank cannot load the weights, or the sender fails. An error of a rank is raised
            unchanged on that rank, SystemExit and KeyboardInterrupt included; the other ranks raise a ValueError that
            quotes it.
    """
    start = time.perf_counter()
    header = group.broadcast_object(None)
    is_expected = header.version == version
    _exchange(group, "" if is_expected else f"expected weights of version {version}, found version {header.version}")
    receiving = _Receiving(receiver, group, header)
    checksum = receiving.receive()
    return SyncReport(version, receiving.loading.bytes, time.perf_counter() - start, checksum)


class _Receiving:
    """A push on a rollout rank."""

    def __init__(self, receiver: WeightReceiver, group: TransferGroup, header: _Header):
        self.loading = Loading(receiver, header.version, header.compares)
        self.group = group
        self.bucket_bytes = header.bucket_bytes
        self.works: dict[int, tuple[list[dist.Work], torch.Tensor]] = {}
        self.sums: list[torch.Tensor] = []
        self.transferring = False  # whether an error comes from the group, not from the receiver

    def receive(self) -> int:
        """Receive and load all buckets. Returns their checksum."""
        try:
            self.loading.load(self._tensors())
        except BaseException as error:
            with suppress(RuntimeError):  # of the group
                if not self.transferring:
                    _exchange(self.group, describe_error(error), raises=False)
                for works, _ in self.works.values():
                    for work in works:
                        work.wait()
            raise
        _exchange(self.group)
        return combine(self.sums)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.transferring = True
        bucket = self._start(0)
        while bucket is not None:
            following = self._start(bucket.number + 1)
            self._finish(bucket)
            self.transferring = False
            yield from bucket.parameters()
            self.transferring = True
            bucket = following
        self.transferring = False

    def _start(self, number: int) -> Bucket | None:
        """Start to receive the next bucket; None at the end."""
        group = self.group
        content, reason = self._allocate(self.bucket_bytes)
        _exchange(group, reason)
        layout = group.broadcast_object(None)
        if layout is None:
            return None
        entries, size = layout
        if size > self.bucket_bytes:
            del content
            content, reason = self._allocate(size)
            _exchange(group, reason)
        content = content[:size]
        rows = -(-size // ROW_BYTES)
        sums = content.new_empty(rows + COLUMNS, dtype=torch.int64)
        self.works[number] = [group.start_broadcast(content), group.start_broadcast(sums)], sums
        return Bucket(number, entries, content)

    def _allocate(self, size: int) -> tuple[torch.Tensor | None, str]:
        """Memory for one bucket, or the error. It is not reused, so that a receiver may keep what it has read."""
        try:
            return torch.empty(size, dtype=torch.uint8, device=self.group.device), ""
        except Exception as error:  # out of memory
            return None, describe_error(error)

    def _finish(self, bucket: Bucket) -> None:
        """Wait for a bucket and compare its checksums."""
        works, sent = self.works.pop(bucket.number)
        for work in works:
            work.wait()
        sums = sums_of(bucket.content)
        row = first_differing_row(sent, sums)
        self.sums.append(sums)
        if row is None:
            return
        name = bucket.parameter_at(row * ROW_BYTES) if row >= 0 else "(none: the checksums themselves differ)"
        _exchange(
            self.group,
            f"bucket {bucket.number} is corrupted on rollout rank {self.group.rank - 1}: its checksum is "
            f"{format_checksum(combine([sums]))}, expected {format_checksum(combine([sent]))}; the first differing "
            f"parameter is {name}",
        )


def _exchange(group: TransferGroup, reason: str = "", raises: bool = True) -> None:
    """Check that every rank can continue. reason: why this one cannot; empty if it can.

    Raises:
        ValueError: on every rank that `raises`, with the reason of the first rank that cannot continue.
    """
    if not any(failed for (failed,) in group.gather([int(bool(reason))])):
        return
    content = reason.encode()[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
    texts = [bytes(text).rstrip(b"\0").decode(errors="ignore") for text in group.gather(list(content))]
    if raises:
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        if rank == 0:
            raise ValueError(f"weight sync: training rank 0 cannot send the weights: {text}")
        raise ValueError(f"weight sync: rollout rank {rank - 1} cannot load the weights: {text}")
