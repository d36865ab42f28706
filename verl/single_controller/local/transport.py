"""Messages between the controller and its ranks: pickles through a channel, tensor data through shared memory.

A `Parcel` separates a value into a pickle and the memory of its tensors and arrays. It writes both into an
anonymous memory file, whose descriptor is sent: no named object can be left behind, the size limit of /dev/shm does
not apply, and the data is copied once regardless of the number of receivers. A receiver maps the file privately, so its
writes are not visible elsewhere. The message itself is a few bytes, so `send` does not wait for a busy receiver.
A message can carry further memory files, which the pickle describes.
"""

import mmap
import os
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

import torch

from verl.processes.child import Channel
from verl.single_controller.dispatch import Call
from verl.single_controller.remote_batch import (
    Packed,
    PackedCall,
    RemoteTensor,
    Source,
    dumps,
    large_columns,
    load_call,
    loads,
)

_HEADER = struct.Struct("<BQ?")  # kind, call id, whether the content is the first file instead of what follows
_INLINE_LIMIT = 4096  # bytes; larger pickles are sent in a memory file
_ALIGNMENT = 64


class Kind(IntEnum):
    """The type of a message. The reply to a SILENT_CALL has no result."""

    START = 1
    CALL = 2
    SILENT_CALL = 3
    STOP = 4
    RESULT = 5
    FAILURE = 6


class MemoryFile:
    """An anonymous memory file. Its descriptor is closed when the object is garbage-collected."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def write(cls, buffers: Sequence[memoryview]) -> tuple["MemoryFile", list[int]]:
        """Write buffers to a new file. Returns the file, and the offset of each buffer in bytes."""
        file, offsets = cls(_memory_file()), _offsets([buffer.nbytes for buffer in buffers])
        for buffer, offset in zip(buffers, offsets):
            done = 0
            while done < buffer.nbytes:  # a single call writes at most 2 GiB
                done += os.pwrite(file.descriptor, buffer[done:], offset + done)
        os.ftruncate(file.descriptor, offsets[-1])  # an empty last buffer has not extended the file
        return file, offsets[:-1]

    def map(self) -> mmap.mmap:
        """Map the file copy-on-write: writes are not visible to other processes."""
        return mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


@dataclass(frozen=True)
class Message:
    """A received message. The content stays packed until `load`.

    Attributes:
        call_id: The call that it belongs to.
        content: The pickle, or a mapped file with the sizes of the pickle and its buffers, and these.
        files: Further memory files that were sent with it.
    """

    kind: Kind
    call_id: int
    content: bytes | mmap.mmap
    files: tuple[MemoryFile, ...] = ()

    def load(self, resolve: Callable[[Any], Any] = lambda reference: None) -> Any:
        """Unpack the value. `resolve` maps the references of `Parcel` back to values."""
        if isinstance(self.content, bytes):
            return loads(self.content, (), resolve)
        view = memoryview(self.content)
        (count,) = struct.unpack_from("<Q", view)
        sizes = struct.unpack_from(f"<{count + 1}Q", view)
        _, *offsets, _ = _offsets([8 * len(sizes), *sizes[1:]])
        head, *buffers = (view[offset : offset + size] for offset, size in zip(offsets, sizes[1:]))
        return loads(head, buffers, resolve)


class Parcel:
    """A value packed once, to be sent to any number of processes.

    Args:
        to_reference: Maps a value to a reference that is sent in its place, or to None to send the value itself.
        files: Memory files to send with it.
    """

    def __init__(
        self, value: Any, to_reference: Callable[[Any], Any] = lambda value: None, files: Sequence[MemoryFile] = ()
    ):
        self._head, buffers = dumps(value, to_reference)
        self._files, self._in_file = tuple(files), bool(buffers) or len(self._head) > _INLINE_LIMIT
        if self._in_file:
            contents = [memoryview(self._head), *buffers]
            sizes = struct.pack(f"<{1 + len(contents)}Q", len(contents), *(content.nbytes for content in contents))
            file, _ = MemoryFile.write([memoryview(sizes), *contents])
            self._files, self._head = (file, *files), b""

    def send(self, channel: Channel, kind: Kind, call_id: int) -> None:
        """Send the value. Raises ConnectionError if the receiver has closed the channel."""
        header = _HEADER.pack(kind, call_id, self._in_file)
        channel.send(header + self._head, [file.descriptor for file in self._files])


def receive(channel: Channel) -> Message:
    """Receive the next message. Raises EOFError if the sender has closed the channel."""
    data, descriptors = channel.receive()
    kind, call_id, in_file = _HEADER.unpack_from(data)
    files = [MemoryFile(descriptor) for descriptor in descriptors]
    content = files.pop(0).map() if in_file else data[_HEADER.size :]
    return Message(Kind(kind), call_id, content, tuple(files))


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where buffers of these sizes are in a file: one after the other, aligned. The last number is the end."""
    return [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]


def _memory_file() -> int:
    """The descriptor of an anonymous file, which exists while it is open or mapped anywhere."""
    if sys.platform == "linux":
        return os.memfd_create("verl-message")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# ---- batches by reference -------------------------------------------------------------------------------------------

# A rank writes the large columns of a result into a memory file. The controller holds the file descriptor and a
# RemoteTensor per column, and uses no memory until an operator reads one. A rank that needs rows receives the
# descriptor and reads them itself. A file is freed when no column refers to it.


@dataclass(frozen=True)
class ColumnLocation:
    """Where a column is in a memory file. offset: in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, file: MemoryFile, rows: torch.Tensor) -> torch.Tensor:
        """Rows (n,) of the column. Consecutive rows are mapped copy-on-write instead of copied."""
        count = torch.Size(self.shape).numel()
        column = torch.frombuffer(file.map(), dtype=self.dtype, count=count, offset=self.offset).view(self.shape)
        first, n = int(rows[0]), len(rows)
        if torch.equal(rows, torch.arange(first, first + n)):
            return column[first : first + n]
        return column[rows]


class FileSource(Source):
    """The large columns of one result, in a memory file."""

    def __init__(self, file: MemoryFile):
        self.file = file
        self.columns: dict[str, ColumnLocation] = {}

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.columns[name].read(self.file, rows)


def result_parcel(value: Any) -> Parcel:
    """On a rank: pack a result, with its large columns in a memory file."""
    large = large_columns(value)
    if not large:
        return Parcel(value)
    tensors = [t.detach().cpu().contiguous() for t in large.values()]
    file, offsets = MemoryFile.write([memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors])
    locations = [ColumnLocation(offset, tuple(t.shape), t.dtype) for offset, t in zip(offsets, tensors)]
    references = {id(t): (name, location) for (name, t), location in zip(large.items(), locations)}
    return Parcel(value, lambda x: references.get(id(x)) if isinstance(x, torch.Tensor) else None, [file])


def load_result(message: Message) -> Any:
    """On the controller: unpack a result, with a RemoteTensor for each large column."""
    sources = [FileSource(file) for file in message.files]

    def resolve(reference: tuple[str, ColumnLocation]) -> RemoteTensor:
        (source,) = sources
        name, location = reference
        source.columns[name] = location
        return RemoteTensor.from_source(name, source, location.shape, location.dtype)

    return message.load(resolve)


def call_parcel(role: str, method: str, call: Call) -> Parcel:
    """On the controller: pack a call, with the memory files of the remote columns among its arguments."""
    packed = PackedCall((call.args, call.kwargs), FileSource)
    sources: list[FileSource] = list(dict.fromkeys(ref.source for ref in packed.refs))
    refs = [
        (sources.index(ref.source), {name: ref.source.columns[name] for name in ref.names}, ref.rows)
        for ref in packed.refs
    ]
    content = (role, method, call.padding, packed.packed, refs)
    return Parcel(content, files=[source.file for source in sources])


def unpack_call(message: Message, packed: Packed, refs: list) -> tuple[tuple, Mapping[str, Any]]:
    """On a rank: the (args, kwargs) of a call, from the last fields of a `call_parcel` and the files of its message."""
    columns = [
        {name: location.read(message.files[number], rows) for name, location in locations.items()}
        for number, locations, rows in refs
    ]
    return load_call(packed, columns)
