"""Messages between the controller and its ranks: pickles through a channel, tensor data through shared memory.

A `Parcel` separates a value into a pickle and the memory of its tensors and arrays. It writes both into an
anonymous memory file, whose descriptor is sent: no named object can be left behind, the size limit of /dev/shm does
not apply, and the data is copied once regardless of the number of receivers. A receiver maps the file privately, so its
writes are not visible elsewhere. The message itself is a few bytes, so `send` does not wait for a busy receiver.
A message can carry further memory files, which the pickle describes (see `column_files`).
"""

import mmap
import os
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

from verl.processes.channel import Channel
from verl.single_controller.remote_batch import dumps, loads

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
