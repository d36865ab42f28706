"""How values travel between processes of one host: pickles through a socket, tensor data through shared memory.

`pack` separates an object into a pickle and the raw memory of its tensors and arrays (pickle protocol 5, out of band);
tensors arrive as plain CPU tensors without a graph. `send` writes both into one anonymous memory file and passes its
descriptor, so nothing has a name that could be left behind, no /dev/shm limit applies, and the data is copied once
however many processes get it. The receiver maps the file privately: what it writes into a tensor, nobody else sees.
A message itself is a few bytes, so sending one never waits for a busy receiver.
"""

import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from typing import Any

import torch

from verl.protocol import DataProto
from verl.single_controller.remote_tensor import RemoteTensor

_HEADER = struct.Struct("<BQQ?")  # kind, call id, bytes that follow (or bytes of the file), whether a file comes along
_SIZE = struct.Struct("<Q")
_INLINE_LIMIT = 4096
_ALIGNMENT = 64


class Kind(IntEnum):
    """What a message is. A SILENT_CALL answers that it is done, without its result."""

    START = 1
    CALL = 2
    SILENT_CALL = 3
    STOP = 4
    RESULT = 5
    FAILURE = 6


@dataclass(frozen=True)
class Message:
    """A received message: its content stays packed until `load`."""

    kind: Kind
    call_id: int
    content: bytes | mmap.mmap

    def load(self) -> Any:
        """The object that was sent."""
        if isinstance(self.content, bytes):
            return pickle.loads(self.content)
        view, offset = memoryview(self.content), _SIZE.size
        (parts,) = _SIZE.unpack_from(view)
        sizes = struct.unpack_from(f"<{parts}Q", view, offset)
        offset, buffers = offset + 8 * parts, []
        for size in sizes:
            offset = _aligned(offset)
            buffers.append(view[offset : offset + size])
            offset += size
        return pickle.loads(buffers[0], buffers=buffers[1:])


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _tensor_from(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape) if buffer is not None else torch.empty(shape, dtype=dtype)


class TensorPickler(pickle.Pickler):
    """Sends the memory of tensors out of band, and of a slice only its own part. `buffers` collects it."""

    def __init__(self, stream: BytesIO, buffers: list[pickle.PickleBuffer]):
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, RemoteTensor):
            value = value.fetch()
        if isinstance(value, DataProto):
            return DataProto.from_dict, (value.tensors, value.non_tensor_batch, value.meta_info)
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            data = value.detach().cpu().contiguous()
            memory = pickle.PickleBuffer(data.reshape(-1).view(torch.uint8).numpy()) if data.numel() else None
            return _tensor_from, (memory, data.dtype, tuple(data.shape))
        return NotImplemented


def pack(value: Any) -> tuple[bytes, list[memoryview]]:
    """The pickle of a value and the memory of its tensors and arrays, in the order that `pickle.loads` takes it."""
    buffers: list[pickle.PickleBuffer] = []
    stream = BytesIO()
    TensorPickler(stream, buffers).dump(value)
    return stream.getvalue(), [b.raw() for b in buffers]


class Parcel:
    """A value packed once, to be sent to any number of processes. `close` it (or use `with`) after the last `send`."""

    def __init__(self, value: Any):
        head, buffers = pack(value)
        self._head, self._file, self._size = head, None, len(head)
        if buffers or len(head) > _INLINE_LIMIT:
            self._file = _memory_file()
            self._size = _write_parts(self._file, [memoryview(head), *buffers])

    def send(self, to: socket.socket, kind: Kind, call_id: int) -> None:
        """Raises OSError when the receiver is gone."""
        header = _HEADER.pack(kind, call_id, self._size, self._file is not None)
        if self._file is None:
            to.sendall(header + self._head)
        else:
            socket.send_fds(to, [header], [self._file])

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> "Parcel":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


def send(to: socket.socket, kind: Kind, call_id: int, value: Any) -> None:
    """Send one value to one process."""
    with Parcel(value) as parcel:
        parcel.send(to, kind, call_id)


def receive(source: socket.socket) -> Message:
    """The next message. Raises EOFError when the other side is gone."""
    header, descriptors, _, _ = socket.recv_fds(source, _HEADER.size, 1)
    if not header:
        raise EOFError("the other side has closed the connection")
    header += _read(source, _HEADER.size - len(header))
    kind, call_id, size, has_file = _HEADER.unpack(header)
    if not has_file:
        return Message(Kind(kind), call_id, _read(source, size))
    (descriptor,) = descriptors
    try:
        content = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return Message(Kind(kind), call_id, content)


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


def _write_parts(file: int, parts: Iterable[memoryview]) -> int:
    """Write the number of parts, their sizes, and each part at an aligned offset; the size of the file."""
    parts = list(parts)
    table = _SIZE.pack(len(parts)) + struct.pack(f"<{len(parts)}Q", *(p.nbytes for p in parts))
    _write(file, memoryview(table), 0)
    end = len(table)
    for part in parts:
        offset = _aligned(end)
        _write(file, part, offset)
        end = offset + part.nbytes
    os.ftruncate(file, end)  # a last part of no bytes leaves the file short
    return end


def _write(file: int, data: memoryview, offset: int) -> None:
    """All of `data`: one write call takes 2 GiB at most."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(file, data[done:], offset + done)
