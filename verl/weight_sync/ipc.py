"""`ipc`: the rollout engine runs in other processes that share the trainer's device.

A bucket is shared memory (a CUDA IPC handle on a GPU): the engine's processes read it where the trainer wrote it. Two
buckets alternate; one is filled again when every process has acknowledged that it has loaded it. Messages are pickles
over a `Channel`, whose other end must be trusted, such as an authenticated `multiprocessing.connection.Connection`:

    trainer                                             engine process
    ("part", version, config, is_last, compares)  ->
    ("bucket", Bucket without content, slot,
     handle or None, sums)                        ->    map, verify, load
                                                  <-    "" or the error
    ("end",)                                      ->
                                                  <-    ("done", bytes, checksum) or the error
    ("error", text)                               ->
"""

import io
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

import torch
from torch import multiprocessing

from verl.weight_sync.adapters import Part, push_parts
from verl.weight_sync.base import (
    AdapterReceiver,
    Channel,
    ReceivesWeights,
    RemoteReceiver,
    SyncReport,
    WeightReceiver,
    WeightSource,
    WeightSync,
    describe_error,
)
from verl.weight_sync.buckets import BUCKET_BYTES, Bucket, pack
from verl.weight_sync.verify import ROW_BYTES, Loading, combine, first_differing_row, fold, sums_of

_TIMEOUT = 600.0  # seconds until a process that does not respond is an error


class IpcSync(WeightSync):
    """The training side of `ipc`. The engine's processes call `receive_ipc`.

    Args:
        rollout: the engine; its receiver is a `RemoteReceiver`.
        device: device of the trainer and of the engine's processes.
        dtype: dtype of the sent weights; None: not cast.
        bucket_bytes: size of each of the two buckets.
        adapters: whether adapters are sent separately from the base weights.
        bandwidth: bytes per second of a copy on this device, for the report.
        timeout: seconds until a process that does not respond is an error.
        check_every: see `WeightSync`.
    """

    def __init__(
        self,
        rollout: ReceivesWeights,
        device: torch.device,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        adapters: bool = False,
        bandwidth: float = 0.0,
        timeout: float = _TIMEOUT,
        check_every: int = 1,
    ):
        super().__init__(check_every)
        self.rollout = rollout
        self.device = device
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes
        self.adapters = adapters
        self.bandwidth = bandwidth
        self.timeout = timeout

    def _push(self, engine: WeightSource, version: int, compares: bool) -> SyncReport:
        size, checksums = 0, []
        receiver = self.rollout.receiver()
        assert isinstance(receiver, RemoteReceiver)
        has_base = isinstance(receiver, AdapterReceiver) and receiver.has_base
        parts = push_parts(engine, self.adapters, has_base)
        channels = receiver.start_receiving(version)
        for number, part in enumerate(parts):
            _send_all(channels, ("part", version, part.config, number == len(parts) - 1, compares))
            part_bytes, checksum = _Sending(self, channels, part).send()
            size += part_bytes
            checksums.append(checksum)
        receiver.finish_receiving()
        self.rollout.weight_version = version
        return SyncReport(version, size, checksum=fold(checksums), bandwidth=self.bandwidth)


class _Sending:
    """One part of a push."""

    def __init__(self, sync: IpcSync, channels: list[Channel], part: Part):
        self.sync = sync
        self.channels = channels
        self.part = part
        self.slots: dict[int, int] = {}  # address of a shared buffer -> its slot, once its handle has been sent
        self.pending: list[int] = []  # numbers of the buckets without an acknowledgement

    def send(self) -> tuple[int, int]:
        """Send all buckets. Returns their bytes and checksum."""
        sync, all_sums, size = self.sync, [], 0
        try:
            for bucket in pack(
                self.part.tensors,
                device=sync.device,
                dtype=sync.dtype if self.part.config is None else None,
                bucket_bytes=sync.bucket_bytes,
                wait=self._wait,
                allocate=lambda size: _shared(size, sync.device),
            ):
                sums = sums_of(bucket.content)
                self._send(bucket, sums)
                all_sums.append(sums)
                size += bucket.bytes
        except BaseException as error:
            _send_all(self.channels, ("error", describe_error(error)), ignore_errors=True)
            raise
        while self.pending:
            self._wait(self.pending[0])
        _send_all(self.channels, ("end",))
        for number, channel in enumerate(self.channels):
            self._acknowledge(number, channel)
        return size, combine(all_sums)

    def _send(self, bucket: Bucket, sums: torch.Tensor) -> None:
        content = bucket.content
        if len(content) > self.sync.bucket_bytes and not content.is_cuda:  # a parameter in separate memory
            content = _shared(len(content), content.device).copy_(content)
        slot = self.slots.get(content.data_ptr())
        handle = None
        if slot is None:
            handle = content
            if len(content) <= self.sync.bucket_bytes:
                handle = content.as_strided((self.sync.bucket_bytes,), (1,), content.storage_offset())
                self.slots[content.data_ptr()] = slot = len(self.slots)
        if content.is_cuda:
            torch.cuda.synchronize(content.device)  # the other processes do not know this stream
        head = (bucket.number, bucket.entries, len(content))
        _send_all(self.channels, ("bucket", head, slot, handle, sums.cpu().numpy()))
        self.pending.append(bucket.number)

    def _wait(self, number: int) -> None:
        """Wait until every process has loaded the bucket and all before it."""
        while self.pending and self.pending[0] <= number:
            for process, channel in enumerate(self.channels):
                self._acknowledge(process, channel)
            self.pending.pop(0)

    def _acknowledge(self, process: int, channel: Channel) -> None:
        """Read one acknowledgement. Raises ValueError for an error or none."""
        try:
            text = pickle.loads(channel.recv_bytes()) if channel.poll(self.sync.timeout) else "it does not respond"
        except (EOFError, OSError):
            text = "it has ended"
        if text:
            raise ValueError(f"weight sync: rollout process {process} cannot load the weights: {text}")


def receive_ipc(receiver: WeightReceiver, channel: Channel, version: int) -> SyncReport:
    """The rollout side of `ipc`, in a process of the engine: receive one push.

    Raises:
        ValueError: the sender failed, another version or corrupted weights arrive, or the receiver cannot load them.
            An error of the receiver is raised unchanged; the sender raises a ValueError that quotes it.
    """
    start, size, checksums, is_last = time.perf_counter(), 0, [], False
    try:
        while not is_last:
            kind, *values = pickle.loads(channel.recv_bytes())
            if kind == "error":
                raise _SenderError(f"weight sync: the trainer cannot send the weights: {values[0]}")
            pushed, config, is_last, compares = values
            if pushed != version:
                raise ValueError(f"expected weights of version {version}, found version {pushed}")
            sums: list[torch.Tensor] = []
            loading = Loading(receiver, version, compares)
            loading.load(Part(config, _received(channel, sums)))
            size += loading.bytes
            checksums.append(combine(sums))
            channel.send_bytes(pickle.dumps(""))
    except _SenderError:
        raise
    except BaseException as error:
        channel.send_bytes(pickle.dumps(describe_error(error)))
        raise
    return SyncReport(version, size, time.perf_counter() - start, fold(checksums))


class _SenderError(ValueError):
    """The trainer failed, and expects no reply."""


def _received(channel: Channel, sums: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every parameter of one part of a push: views of shared memory, valid until the next one
    is read. sums: those of each bucket are appended."""
    buffers: dict[int, torch.Tensor] = {}
    while True:
        kind, *values = pickle.loads(channel.recv_bytes())
        if kind == "end":
            return
        if kind == "error":
            raise _SenderError(f"weight sync: the trainer cannot send the weights: {values[0]}")
        (number, entries, size), slot, handle, sent = values
        if handle is not None and slot is not None:
            buffers[slot] = handle
        bucket = Bucket(number, entries, (handle if slot is None else buffers[slot])[:size])
        received = sums_of(bucket.content)
        row = first_differing_row(torch.from_numpy(sent).to(received.device), received)
        if row is not None:
            name = bucket.parameter_at(max(row, 0) * ROW_BYTES)
            raise ValueError(f"bucket {number} is corrupted; the first differing parameter is {name}")
        sums.append(received)
        yield from bucket.parameters()
        if bucket.content.is_cuda:
            torch.cuda.synchronize(bucket.content.device)  # the loads have ended before the trainer writes again
        del bucket, handle
        channel.send_bytes(pickle.dumps(""))


def _shared(size: int, device: torch.device) -> torch.Tensor:
    """Memory that other processes can map: (size,) uint8."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device)
    with _named_memory():
        return torch.empty(size, dtype=torch.uint8).share_memory_()


@contextmanager
def _named_memory() -> Iterator[None]:
    """Context in which shared host memory has a name that any process of this host and user can open."""
    strategy = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(strategy)


def _send_all(channels: list[Channel], message: tuple, ignore_errors: bool = False) -> None:
    """Send a message to every process. A CUDA handle is made for each, because each one counts references."""
    for process, channel in enumerate(channels):
        content = io.BytesIO()
        try:
            with _named_memory():
                ForkingPickler(content).dump(message)
            channel.send_bytes(content.getvalue())
        except OSError as error:
            if not ignore_errors:
                reason = "has ended" if isinstance(error, ConnectionError) else f"did not get the weights: {error}"
                raise ValueError(f"weight sync: rollout process {process} {reason}") from error
