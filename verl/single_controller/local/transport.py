"""Messages between processes of one host: pickles through a socket, tensor data through shared memory.

A `Parcel` separates a value into a pickle and the memory of its tensors and arrays. `send` writes both into an
anonymous memory file and passes its descriptor: no named object can be left behind, the size limit of /dev/shm does
not apply, and the data is copied once regardless of the number of receivers. A receiver maps the file privately, so its
writes are not visible elsewhere. The message itself is a few bytes, so `send` does not wait for a busy receiver.
A message can carry further memory files, which the pickle describes (see `column_files`).
"""

import mmap
import os
import socket
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from verl.single_controller.remote_batch import dumps, loads

_HEADER = struct.Struct("<BQQ?I")  # kind, call id, size in bytes, whether the content is a file, number of other files
_SIZE = struct.Struct("<Q")
_INLINE_LIMIT = 4096  # bytes; larger pickles are sent in a memory file
_ALIGNMENT = 64
_MAX_FDS = 250  # per message; Linux accepts up to 253


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
    def of(cls, buffers: Sequence[memoryview]) -> tuple["MemoryFile", list[int], int]:
        """Write buffers to a new file.

        Returns:
            The file, the offset of each buffer, and the size of the file, in bytes.
        """
        file = cls(_memory_file())
        offsets, end = [], 0
        for buffer in buffers:
            offsets.append(_aligned(end))
            _write(file.descriptor, buffer, offsets[-1])
            end = offsets[-1] + buffer.nbytes
        os.ftruncate(file.descriptor, end)  # an empty last buffer has not extended the file
        return file, offsets, end

    def map(self) -> mmap.mmap:
        """Map the file copy-on-write: writes are not visible to other processes."""
        return mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


@dataclass(frozen=True)
class Message:
    """A received message. The content stays packed until `load`.

    Attributes:
        kind: Type of the message.
        call_id: The call that it belongs to.
        content: The pickle, or a mapped file with the pickle and its buffers.
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
        (count,) = _SIZE.unpack_from(view)
        table = struct.unpack_from(f"<{2 * count}Q", view, _SIZE.size)
        head, *buffers = (view[start : start + size] for start, size in zip(table[::2], table[1::2]))
        return loads(head, buffers, resolve)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class Parcel:
    """A value packed once, to be sent to any number of processes.

    Args:
        value: The value.
        to_reference: Maps a value to a reference that is sent in its place, or to None to send the value itself.
        files: Memory files to send with it.
    """

    def __init__(
        self, value: Any, to_reference: Callable[[Any], Any] = lambda value: None, files: Sequence[MemoryFile] = ()
    ):
        head, buffers = dumps(value, to_reference)
        self._head, self._file, self._size, self._files = head, None, len(head), tuple(files)
        if buffers or len(head) > _INLINE_LIMIT:
            self._file, self._size = _content_file([memoryview(head), *buffers])

    def send(self, to: socket.socket, kind: Kind, call_id: int) -> None:
        """Send the value. Raises OSError if the receiver has closed the connection."""
        data = _HEADER.pack(kind, call_id, self._size, self._file is not None, len(self._files))
        files = self._files if self._file is None else (self._file, *self._files)
        for start in range(0, len(files), _MAX_FDS):
            socket.send_fds(to, [data], [file.descriptor for file in files[start : start + _MAX_FDS]])
            data = b"+"  # descriptors cannot be sent without data
        if not files:
            to.sendall(data)
        if self._file is None:
            to.sendall(self._head)


def send(to: socket.socket, kind: Kind, call_id: int, value: Any) -> None:
    """Send a value to one process."""
    Parcel(value).send(to, kind, call_id)


def receive(source: socket.socket) -> Message:
    """Receive the next message. Raises EOFError if the sender has closed the connection."""
    header, descriptors, _, _ = socket.recv_fds(source, _HEADER.size, _MAX_FDS)
    if not header:
        raise EOFError("the other process closed the connection")
    header += _read(source, _HEADER.size - len(header))
    kind, call_id, size, has_file, further = _HEADER.unpack(header)
    files = [MemoryFile(descriptor) for descriptor in descriptors]
    while len(files) < has_file + further:
        byte, descriptors, _, _ = socket.recv_fds(source, 1, _MAX_FDS)
        if not byte:
            raise EOFError("the other process closed the connection during a message")
        files += [MemoryFile(descriptor) for descriptor in descriptors]
    content = files.pop(0).map() if has_file else _read(source, size)
    return Message(Kind(kind), call_id, content, tuple(files))


def _read(source: socket.socket, size: int) -> bytes:
    chunks = []
    while size:
        chunk = source.recv(size)
        if not chunk:
            raise EOFError("the other process closed the connection during a message")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _memory_file() -> int:
    """The descriptor of an anonymous file, which exists while it is open or mapped anywhere."""
    if sys.platform == "linux":
        return os.memfd_create("verl-message")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _content_file(buffers: Sequence[memoryview]) -> tuple[MemoryFile, int]:
    """A file with the number of buffers, the (offset, size) of each, and the buffers; and its size in bytes."""
    first = _aligned(_SIZE.size * (1 + 2 * len(buffers)))
    table, end = [len(buffers)], first
    for buffer in buffers:
        table += [_aligned(end), buffer.nbytes]
        end = _aligned(end) + buffer.nbytes
    file, _, size = MemoryFile.of([memoryview(struct.pack(f"<{len(table)}Q", *table)), *buffers])
    return file, size


def _write(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data`; a single call writes at most 2 GiB."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(file, data[done:], offset + done)
