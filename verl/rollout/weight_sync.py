"""Weight sync: copies the weights of the training engine to the rollout engines after each update.

    report = weight_sync.push(train_engine, version=step)      # collective: call it on every training rank
    report.bytes, report.seconds, report.checksum

Three methods:

- in_process: the rollout engine generates with the trainer's parameters; nothing is copied.
- replica: the rollout engine in the same process has an unsharded copy, gathered from all ranks.
- collective: rollout ranks have their own devices; training rank 0 broadcasts buckets over torch.distributed (gloo, or
  NCCL on GPUs), and both sides compare a checksum per bucket.

`version` is the number of completed training steps, so that a resumed run reproduces it.
"""

import pickle
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed as dist

from verl.rollout.base import RolloutEngine

#: max bytes of a bucket; a larger parameter has a bucket by itself
BUCKET_BYTES = 128 * 2**20

_WORDS_AT_ONCE = 1 << 22  # of a checksum
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_ALIGNMENT = 8  # bytes
_ERROR_BYTES = 2000  # max length of an error message sent to the other ranks


@dataclass(frozen=True)
class SyncReport:
    """Result of one push. bytes: sent to each rollout rank. checksum: of all buckets; 0 if nothing was sent."""

    version: int
    bytes: int = 0
    seconds: float = 0.0
    checksum: int = 0


class WeightSource(Protocol):
    """The part of a training engine that a sync reads (see verl.engines.base.TrainEngine)."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, full tensor) of every parameter, adapters merged. Collective: all ranks must
        iterate."""


class WeightReceiver(Protocol):
    """The rollout engine's side."""

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load all parameters, by HuggingFace name: iterate to the end of `weights`. Raises ValueError for missing or
        unknown parameters."""

    def release(self) -> None:
        """Free the weights until the next `receive`."""


class WeightSync(ABC):
    """Copies the weights of a training engine to the rollout engines."""

    @abstractmethod
    def push(self, engine: WeightSource, version: int) -> SyncReport:
        """Push the current weights. Called on every training rank."""


class InProcessSync(WeightSync):
    """The rollout engine shares the trainer's parameters: nothing to copy."""

    def __init__(self, rollout: RolloutEngine):
        self.rollout = rollout

    def push(self, engine: WeightSource, version: int) -> SyncReport:
        self.rollout.weight_version = version
        return SyncReport(version)


class ReplicaSync(WeightSync):
    """The rollout engine in this process has a separate copy of the weights, filled by its receiver."""

    def __init__(self, rollout: RolloutEngine):
        self.rollout = rollout

    def push(self, engine: WeightSource, version: int) -> SyncReport:
        start, sent, complete = time.perf_counter(), 0, False

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal sent, complete
            for name, tensor in engine.weights():
                sent += tensor.numel() * tensor.element_size()
                yield name, tensor
            complete = True

        receiver = self.rollout.receiver()
        receiver.receive(counted(), version)
        if not complete:
            raise _incomplete(receiver)
        self.rollout.weight_version = version
        return SyncReport(version, sent, time.perf_counter() - start)


class ModuleReceiver:
    """Receives weights into a module. Its parameters use memory only between `receive` and `release`."""

    def __init__(self, module: torch.nn.Module, filled: bool = False):
        """filled: whether the module already has its weights."""
        self.module = module
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.filled = filled
        if not filled:
            self.release()

    def check_filled(self) -> None:
        """Raise ValueError before the first `receive` and after `release`."""
        if not self.filled:
            raise ValueError("the rollout engine has no weights: push them first (WeightSync.push)")

    @torch.no_grad()
    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `WeightReceiver.receive`. Parameters are cast to the module's dtype."""
        if not self.filled:
            for name, shape in self.shapes.items():
                parameter = self.module.get_parameter(name)
                parameter.data = parameter.data.new_empty(shape)
        self.filled, missing = False, set(self.shapes)
        for name, tensor in weights:
            if name not in missing:
                raise ValueError(f"weights of version {version}: parameter {name!r} is unknown or was sent twice")
            if self.shapes[name] != tensor.shape:
                raise ValueError(
                    f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, expected "
                    f"{tuple(self.shapes[name])}"
                )
            missing.remove(name)
            self.module.get_parameter(name).copy_(tensor)
        if missing:
            raise ValueError(f"weights of version {version}: {len(missing)} are missing, first {sorted(missing)[:3]}")
        self.filled = True

    def release(self) -> None:
        """See `WeightReceiver.release`."""
        self.filled = False
        for name in self.shapes:
            parameter = self.module.get_parameter(name)
            parameter.data = parameter.data.new_empty(0)


def _incomplete(receiver: WeightReceiver) -> ValueError:
    return ValueError(f"{type(receiver).__name__}.receive returned before it had read all weights")


# ---- collective ---------------------------------------------------------------------------------------------------
#
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


@dataclass(frozen=True)
class _Entry:
    """One parameter of a bucket. start: its byte offset."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    checksum: int

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


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
            total = _fold(total, self._send(number, version, *bucket))
            sent, number = sent + sum(entry.bytes for entry in bucket[0]), number + 1
            del bucket  # a large parameter is freed before the next one is gathered
        self.group.broadcast_object(None)
        _agree(self.group)
        return SyncReport(version, sent, time.perf_counter() - start, total)

    def _buckets(self, engine: WeightSource) -> Iterator[tuple[list[_Entry], torch.Tensor]]:
        """Yield the entries and the content of each bucket: (n,) uint8, valid until the next one.

        Parameters are copied before the next one is read, because `weights()` may reuse its memory.
        """
        buffer, entries, end = None, [], 0
        for name, tensor in engine.weights():
            dtype, shape = self.dtype or tensor.dtype, tuple(tensor.shape)
            size = tensor.numel() * dtype.itemsize
            padded = _padded(size)
            if entries and end + padded > self.bucket_bytes:
                yield entries, buffer[:end]
                entries, end = [], 0
            if padded > self.bucket_bytes:
                tensor = _bytes_of(tensor.to(self.group.device, dtype))
                yield [_Entry(name, shape, dtype, 0, checksum_of(tensor))], tensor
                del tensor
                continue
            if buffer is None:
                buffer = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self.group.device)
            span = buffer[end : end + padded]
            span[:size].view(dtype).view(shape).copy_(tensor.detach())
            span[size:].zero_()
            entries.append(_Entry(name, shape, dtype, end, checksum_of(span)))
            end += padded
        if entries:
            yield entries, buffer[:end]

    def _next(self, buckets: Iterator[tuple[list[_Entry], torch.Tensor]]) -> tuple[list[_Entry], torch.Tensor] | None:
        """The next bucket; None at the end. An error is reported to the rollout ranks and raised unchanged."""
        try:
            return next(buckets, None)
        except BaseException as error:
            with suppress(RuntimeError):  # of the group
                self.group.broadcast_object(_describe(error))
            raise

    def _send(self, number: int, version: int, entries: list[_Entry], content: torch.Tensor) -> int:
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

    def next_bucket() -> tuple[int, list[_Entry], torch.Tensor] | None:
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
            spans = [content[e.start : e.start + _padded(e.bytes)] for e in entries]
            total = _fold(total, _compare(group, number, entries, [checksum_of(span) for span in spans]))
            transferring = False
            for entry, span in zip(entries, spans):
                sent += entry.bytes
                yield entry.name, span[: entry.bytes].view(entry.dtype).view(entry.shape)
            transferring = True
        transferring, complete = False, True

    try:
        receiver.receive(buckets(), version)
        if not complete:
            raise _incomplete(receiver)
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


def _compare(group: TransferGroup, number: int, entries: list[_Entry], checksums: list[int]) -> int:
    """Compare the checksums of one bucket on all ranks. Returns the checksum of the bucket."""
    differing = next((i for i, (e, found) in enumerate(zip(entries, checksums)) if e.checksum != found), -1)
    own = 0
    for checksum in checksums:
        own = _fold(own, checksum)
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


def _padded(size: int) -> int:
    """The next multiple of _ALIGNMENT."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, zero-padded to a multiple of _ALIGNMENT: (n,) uint8."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = _padded(len(content)) - len(content)
    return torch.nn.functional.pad(content, (0, rest)) if rest else content


def checksum_of(content: torch.Tensor) -> int:
    """A 64-bit checksum of (n,) uint8, n a multiple of 8: the sum of its 64-bit words, each multiplied by an odd number
    that depends on its position. Equal on every device; changing a single word always changes it."""
    words, total = content.view(torch.int64), 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        chunk = words[start : start + _WORDS_AT_ONCE]
        factors = torch.arange(start, start + len(chunk), device=chunk.device).mul_(2).add_(1).mul_(_ODD)
        total += int((chunk * factors).sum())
    return _signed(total)


def _fold(total: int, checksum: int) -> int:
    """Combine two checksums; the order matters."""
    return _signed(total * 31 * _ODD + checksum + 1)


def _signed(number: int) -> int:
    """Wrap an integer to signed 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
