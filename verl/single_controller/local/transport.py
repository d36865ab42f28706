"""How values travel between processes of one host: pickles through a socket, tensor data through shared memory.

A `Parcel` separates an object into a pickle and the raw memory of its tensors and arrays. `send` writes both into one
anonymous memory file and passes its descriptor, so nothing has a name that could be left behind, no /dev/shm limit
applies, and the data is copied once however many processes get it. The receiver maps the file privately: what it
writes into a tensor, nobody else sees. A message itself is a few bytes, so sending one never waits for a busy receiver.
Further memory files may come along, of which the pickle says what is in them (`column_files`).
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

from verl.single_controller.pickling import pack, unpack

_HEADER = struct.Struct("<BQQ?I")  # kind, call id, bytes that follow (or of the file), whether it is a file, more files
_SIZE = struct.Struct("<Q")
_INLINE_LIMIT = 4096
_ALIGNMENT = 64
_FILES_AT_ONCE = 250  # Linux passes 253 descriptors with one message


class Kind(IntEnum):
    """What a message is. A SILENT_CALL answers that it is done, without its result."""

    START = 1
    CALL = 2
    SILENT_CALL = 3
    STOP = 4
    RESULT = 5
    FAILURE = 6


class MemoryFile:
    """Memory without a name, open in this process until nobody refers to the object; others may have it open too."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, parts: Sequence[memoryview]) -> tuple["MemoryFile", list[int], int]:
        """A file with these parts; the offset of each in it, and its size."""
        file = cls(_memory_file())
        offsets, end = [], 0
        for part in parts:
            offsets.append(_aligned(end))
            _write(file.descriptor, part, offsets[-1])
            end = offsets[-1] + part.nbytes
        os.ftruncate(file.descriptor, end)  # a last part of no bytes leaves the file short
        return file, offsets, end

    def map(self) -> mmap.mmap:
        """The contents. What is written there, nobody else sees."""
        return mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


@dataclass(frozen=True)
class Message:
    """A received message: its content stays packed until `load`. files: what came along with it."""

    kind: Kind
    call_id: int
    content: bytes | mmap.mmap
    files: tuple[MemoryFile, ...] = ()

    def load(self, original: Callable[[Any], Any] = lambda stand_in: None) -> Any:
        """The object that was sent. original: what was sent in the place of a value -> that value."""
        if isinstance(self.content, bytes):
            return unpack(self.content, (), original)
        view = memoryview(self.content)
        (parts,) = _SIZE.unpack_from(view)
        table = struct.unpack_from(f"<{2 * parts}Q", view, _SIZE.size)
        head, *buffers = (view[start : start + size] for start, size in zip(table[::2], table[1::2]))
        return unpack(head, buffers, original)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class Parcel:
    """A value packed once, to be sent to any number of processes.

    stand_in: value -> what is sent in its place, or None to send the value itself. files: what goes along.
    """

    def __init__(
        self, value: Any, stand_in: Callable[[Any], Any] = lambda value: None, files: Sequence[MemoryFile] = ()
    ):
        head, buffers = pack(value, stand_in)
        self._head, self._file, self._size, self._files = head, None, len(head), tuple(files)
        if buffers or len(head) > _INLINE_LIMIT:
            self._file, self._size = _content_file([memoryview(head), *buffers])

    def send(self, to: socket.socket, kind: Kind, call_id: int) -> None:
        """Raises OSError when the receiver is gone."""
        data = _HEADER.pack(kind, call_id, self._size, self._file is not None, len(self._files))
        files = self._files if self._file is None else (self._file, *self._files)
        for start in range(0, len(files), _FILES_AT_ONCE):
            socket.send_fds(to, [data], [file.descriptor for file in files[start : start + _FILES_AT_ONCE]])
            data = b"+"  # descriptors need a byte to travel with
        if not files:
            to.sendall(data)
        if self._file is None:
            to.sendall(self._head)


def send(to: socket.socket, kind: Kind, call_id: int, value: Any) -> None:
    """Send one value to one process."""
    Parcel(value).send(to, kind, call_id)


def receive(source: socket.socket) -> Message:
    """The next message. Raises EOFError when the other side is gone."""
    header, descriptors, _, _ = socket.recv_fds(source, _HEADER.size, _FILES_AT_ONCE)
    if not header:
        raise EOFError("the other side has closed the connection")
    header += _read(source, _HEADER.size - len(header))
    kind, call_id, size, has_file, further = _HEADER.unpack(header)
    files = [MemoryFile(descriptor) for descriptor in descriptors]
    while len(files) < has_file + further:
        byte, descriptors, _, _ = socket.recv_fds(source, 1, _FILES_AT_ONCE)
        if not byte:
            raise EOFError("the other side closed the connection in the middle of a message")
        files += [MemoryFile(descriptor) for descriptor in descriptors]
    content = files.pop(0).map() if has_file else _read(source, size)
    return Message(Kind(kind), call_id, content, tuple(files))


def _read(source: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = source.recv(size)
        if not part:
            raise EOFError("the other side closed the connection in the middle of a message")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _memory_file() -> int:
    """The descriptor of a file without a name: it lives as long as somebody has it open or mapped."""
    if sys.platform == "linux":
        return os.memfd_create("verl-message")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _content_file(parts: Sequence[memoryview]) -> tuple[MemoryFile, int]:
    """A file with a table (the number of parts, then offset and size of each) before the parts; its size."""
    first = _aligned(_SIZE.size * (1 + 2 * len(parts)))
    table, end = [len(parts)], first
    for part in parts:
        table += [_aligned(end), part.nbytes]
        end = _aligned(end) + part.nbytes
    file, _, size = MemoryFile.of([memoryview(struct.pack(f"<{len(table)}Q", *table)), *parts])
    return file, size


def _write(file: int, data: memoryview, offset: int) -> None:
    """All of `data`: one write call takes 2 GiB at most."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(file, data[done:], offset + done)
