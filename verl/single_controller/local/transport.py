"""Messages between the controller and its ranks: pickles through a channel, tensor data through shared memory.

A `Parcel` separates a value into a pickle and the memory of its tensors and arrays. It writes both into an
anonymous memory file, whose descriptor is sent: no named object can be left behind, the size limit of /dev/shm does
not apply, and the data is copied once regardless of the number of receivers. A receiver maps the file privately, so its
writes are not visible elsewhere. The message itself is a few bytes, so `send` does not wait for a busy receiver.
A message can carry further memory files, such as those of earlier results.
"""

import functools
import mmap
import os
import struct
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

import torch

from verl.processes.child import Channel
from verl.single_controller.dispatch import Call
from verl.single_controller.remote_batch import Columns, PackedCall, Source, dumps, loads, unpack_result

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
    def write(cls, buffers: Sequence[memoryview]) -> "MemoryFile":
        """Write buffers to a new file, at `_offsets`."""
        file, offsets = cls(_memory_file()), _offsets([buffer.nbytes for buffer in buffers])
        for buffer, offset in zip(buffers, offsets):
            done = 0
            while done < buffer.nbytes:  # a single call writes at most 2 GiB
                done += os.pwrite(file.descriptor, buffer[done:], offset + done)
        os.ftruncate(file.descriptor, offsets[-1])  # an empty last buffer has not extended the file
        return file

    def map(self) -> mmap.mmap:
        """Map the file copy-on-write: writes are not visible to other processes."""
        return mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


@dataclass(frozen=True)
class Message:
    """A received message. The content stays packed until `load`."""

    kind: Kind
    call_id: int  # the call that it belongs to
    content: bytes | MemoryFile  # the pickle, or a file with the sizes of the pickle and its buffers, and these
    files: tuple[MemoryFile, ...] = ()  # further memory files that were sent with it

    def load(self) -> Any:
        """Unpack the value."""
        if isinstance(self.content, bytes):
            return loads(self.content)
        view = memoryview(self.content.map())
        (count,) = struct.unpack_from("<Q", view)
        sizes = struct.unpack_from(f"<{count + 1}Q", view)
        _, *offsets, _ = _offsets([8 * len(sizes), *sizes[1:]])
        head, *buffers = (view[offset : offset + size] for offset, size in zip(offsets, sizes[1:]))
        return loads(head, buffers)


class Parcel:
    """A value packed once, to be sent to any number of processes.

    Args:
        files: Memory files to send with it.
    """

    def __init__(self, value: Any, files: Sequence[MemoryFile] = ()):
        self._head, buffers = dumps(value)
        self._files, self._in_file = tuple(files), bool(buffers) or len(self._head) > _INLINE_LIMIT
        if self._in_file:
            contents = [memoryview(self._head), *buffers]
            sizes = struct.pack(f"<{1 + len(contents)}Q", len(contents), *(content.nbytes for content in contents))
            self._files, self._head = (MemoryFile.write([memoryview(sizes), *contents]), *files), b""

    def send(self, channel: Channel, kind: Kind, call_id: int) -> None:
        """Send the value. Raises ConnectionError if the receiver has closed the channel."""
        header = _HEADER.pack(kind, call_id, self._in_file)
        channel.send(header + self._head, [file.descriptor for file in self._files])


def receive(channel: Channel) -> Message:
    """Receive the next message. Raises EOFError if the sender has closed the channel."""
    data, descriptors = channel.receive()
    kind, call_id, in_file = _HEADER.unpack_from(data)
    files = [MemoryFile(descriptor) for descriptor in descriptors]
    content = files.pop(0) if in_file else data[_HEADER.size :]
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

# The large columns of a result are in the memory file of its message. The controller holds the file descriptor and a
# RemoteTensor per column, and uses no memory until an operator reads one. A rank that needs rows receives the
# descriptor and reads them itself. A file is freed when no column refers to it.


class FileSource(Source):
    """The `Columns` of one result, in the memory file of its message."""

    def __init__(self, file: MemoryFile):
        self.file = file

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self._columns.fetch(name, rows)

    @functools.cached_property
    def _columns(self) -> Columns:
        return Message(Kind.RESULT, 0, self.file).load()[1]


def load_result(message: Message) -> tuple[Any, tuple[float, float]]:
    """On the controller: unpack the output of `pack_result`, with a RemoteTensor for each large column, and the start
    and end of the call."""
    packed, columns, span = message.load()
    return unpack_result(packed, columns and FileSource(message.content)), span


def call_parcel(role: str, method: str, call: Call) -> Parcel:
    """On the controller: pack a call, with the memory files of the remote columns among its arguments."""
    packed = PackedCall((call.args, call.kwargs))
    return Parcel((role, method, call.padding, packed.packed), [source.file for source in packed.sources])
