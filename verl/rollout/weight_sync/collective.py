"""`collective`: rollout ranks have their own devices, and training rank 0 broadcasts buckets over torch.distributed.

GPU tensors are sent over NCCL, others over gloo. Both sides compare a checksum per bucket.
"""

import pickle
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import torch
from torch import distributed as dist

from verl.rollout.weight_sync.base import SyncReport, WeightReceiver, WeightSource, WeightSync, incomplete
from verl.rollout.weight_sync.buckets import BUCKET_BYTES, Entry, bytes_of, checksum_of, fold, padded

_ERROR_BYTES = 2000  # max length of an error message sent to the other ranks

# Rank 0 broadcasts headers. A header is
#
# - (number, version, entries, bytes): a bucket. All ranks agree to continue (`_agree`), rank 0 broadcasts the content,
#   all ranks compare checksums (`_compare`).
# - None: the end. All ranks agree that the weights are loaded.
# - a string: the error of rank 0. Every rank raises.
#
# A rollout rank that fails while it loads weights waits for the next header and reports its error in `_agree`. So no
# rank waits for one that has failed.


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
        self.store = dist.TCPStore(host, port, size, rank == 0, wait)
        self.control = dist.ProcessGroupGloo(dist.PrefixStore("control", self.store), rank, size, wait)
        self.data = self.control
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            torch.cuda.set_device(device)
            self.data = dist.ProcessGroupNCCL(dist.PrefixStore("data", self.store), rank, size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's tensor in place, on the group's device."""
        self.data.broadcast(tensor, 0).wait()

    def broadcast_object(self, value: object) -> object:
        """Broadcast rank 0's object and return it."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self.control.broadcast(size, 0).wait()
        if self.rank > 0:
            content = torch.empty(int(size), dtype=torch.uint8)
        self.control.broadcast(content, 0).wait()
        return pickle.loads(content.numpy().tobytes())

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """All-gather: the numbers of all ranks."""
        own = torch.tensor(numbers)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self.control.allgather([found], [own]).wait()
        return [other.tolist() for other in found]


class CollectiveSync(WeightSync):
    """The training side of `collective`, on every training rank. Rollout ranks call `receive_collective`.

    Args:
        group: the group with the rollout ranks; None on training ranks other than 0, which only gather weights.
        dtype: dtype of the sent weights; None: not cast.
        bucket_bytes: max size of a bucket.
    """

    def __init__(self, group: TransferGroup | None, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES):
        self.group = group
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes

    def push(self, engine: WeightSource, version: int) -> SyncReport:
        start, sent, total, number = time.perf_counter(), 0, 0, 0
        if self.group is None:
            for _ in engine.weights():
                pass
            return SyncReport(version, seconds=time.perf_counter() - start)
        buckets = self._buckets(engine)
        while (bucket := self._next(buckets)) is not None:
            total = fold(total, self._send(number, version, *bucket))
            sent, number = sent + sum(entry.bytes for entry in bucket[0]), number + 1
            del bucket  # a large parameter is freed before the next one is gathered
        self.group.broadcast_object(None)
        _agree(self.group)
        return SyncReport(version, sent, time.perf_counter() - start, total)

    def _buckets(self, engine: WeightSource) -> Iterator[tuple[list[Entry], torch.Tensor]]:
        """Yield the entries and the content of each bucket: (n,) uint8, valid until the next one.

        Parameters are copied before the next one is read, because `weights()` may reuse its memory.
        """
        buffer, entries, end = None, [], 0
        for name, tensor in engine.weights():
            dtype, shape = self.dtype or tensor.dtype, tuple(tensor.shape)
            size = tensor.numel() * dtype.itemsize
            room = padded(size)
            if entries and end + room > self.bucket_bytes:
                yield entries, buffer[:end]
                entries, end = [], 0
            if room > self.bucket_bytes:
                tensor = bytes_of(tensor.to(self.group.device, dtype))
                yield [Entry(name, shape, dtype, 0, checksum_of(tensor))], tensor
                del tensor
                continue
            if buffer is None:
                buffer = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self.group.device)
            span = buffer[end : end + room]
            span[:size].view(dtype).view(shape).copy_(tensor.detach())
            span[size:].zero_()
            entries.append(Entry(name, shape, dtype, end, checksum_of(span)))
            end += room
        if entries:
            yield entries, buffer[:end]

    def _next(self, buckets: Iterator[tuple[list[Entry], torch.Tensor]]) -> tuple[list[Entry], torch.Tensor] | None:
        """The next bucket; None at the end. An error is reported to the rollout ranks and raised unchanged."""
        try:
            return next(buckets, None)
        except BaseException as error:
            with suppress(RuntimeError):  # of the group
                self.group.broadcast_object(_describe(error))
            raise

    def _send(self, number: int, version: int, entries: list[Entry], content: torch.Tensor) -> int:
        """Send one bucket and compare its checksum with those of the receivers. Returns the checksum."""
        self.group.broadcast_object((number, version, entries, len(content)))
        _agree(self.group)
        self.group.broadcast(content)
        return _compare(self.group, number, entries, [entry.checksum for entry in entries])


def receive_collective(receiver: WeightReceiver, group: TransferGroup, version: int) -> SyncReport:
    """The rollout side of `collective`: receive one push.

    Raises:
        ValueError: a checksum differs (it names the bucket and the first differing parameter), another version arrives
            than expected, another rank cannot load the weights, or the sender fails. An error of a rank is raised
            unchanged on that rank, SystemExit and KeyboardInterrupt included; the other ranks raise a ValueError that
            quotes it.
    """
    start, sent, total = time.perf_counter(), 0, 0
    transferring, complete = False, False  # transferring: not in the code of the receiver

    def next_bucket() -> tuple[int, list[Entry], torch.Tensor] | None:
        header = group.broadcast_object(None)
        if header is None:
            return None
        if isinstance(header, str):
            raise ValueError(f"weight sync: training rank 0 cannot send the weights: {header}")
        number, pushed, entries, size = header
        reason, content = "", None
        if pushed != version:
            reason = f"expected weights of version {version}, found version {pushed}"
        else:
            try:
                content = torch.empty(size, dtype=torch.uint8, device=group.device)
            except Exception as error:  # out of memory
                reason = _describe(error)
        _agree(group, reason)
        group.broadcast(content)
        return number, entries, content

    def buckets() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal sent, total, transferring, complete
        transferring = True
        while (bucket := next_bucket()) is not None:
            number, entries, content = bucket
            spans = [content[e.start : e.start + padded(e.bytes)] for e in entries]
            total = fold(total, _compare(group, number, entries, [checksum_of(span) for span in spans]))
            transferring = False
            for entry, span in zip(entries, spans):
                sent += entry.bytes
                yield entry.name, span[: entry.bytes].view(entry.dtype).view(entry.shape)
            transferring = True
        transferring, complete = False, True

    try:
        receiver.receive(buckets(), version)
        if not complete:
            raise incomplete(receiver)
    except BaseException as error:
        if not transferring:
            with suppress(RuntimeError):  # of the group
                failed = not complete and isinstance(group.broadcast_object(None), str)
                if not failed:
                    _agree(group, _describe(error), raises=False)
        raise
    _agree(group)
    return SyncReport(version, sent, time.perf_counter() - start, total)


def _describe(error: BaseException) -> str:
    """Type and message of an error, for other ranks. Valid UTF-8: surrogates of a path are replaced."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.encode(errors="replace").decode()


def _agree(group: TransferGroup, reason: str = "", raises: bool = True) -> None:
    """Check that every rank can continue with the push, so that no rank waits for one that has failed.

    Args:
        reason: why this rank cannot continue; empty if it can.
        raises: False for a rank that raises its own error.

    Raises:
        ValueError: on every rank, with the reason of the first rank that cannot continue.
    """
    if not any(failed for (failed,) in group.gather([int(bool(reason))])):
        return
    content = reason.encode()[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
    texts = [bytes(found).rstrip(b"\0").decode(errors="ignore") for found in group.gather(list(content))]
    if raises:
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise ValueError(f"weight sync: rollout rank {rank - 1} cannot load the weights: {text}")


def _compare(group: TransferGroup, number: int, entries: list[Entry], checksums: list[int]) -> int:
    """Compare the checksums of one bucket on all ranks. Returns the checksum of the bucket."""
    differing = next((i for i, (e, found) in enumerate(zip(entries, checksums)) if e.checksum != found), -1)
    own = 0
    for checksum in checksums:
        own = fold(own, checksum)
    gathered = group.gather([own, differing])
    for rank, (found, first) in enumerate(gathered):
        if found != gathered[0][0]:
            name = entries[first].name if first >= 0 else "(none: the checksums themselves differ)"
            raise ValueError(
                f"weight sync: bucket {number} is corrupted on rollout rank {rank - 1}: its checksum is "
                f"{found & (2**64 - 1):016x}, expected {gathered[0][0] & (2**64 - 1):016x}; the first differing "
                f"parameter is {name}"
            )
    return own
