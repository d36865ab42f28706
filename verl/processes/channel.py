"""Messages between processes of one host: bytes and file descriptors through a socket.

    ours, theirs = Channel.pair()
    process = PythonProcess(module, [theirs.fileno()], env)     # there: Channel(int(sys.argv[1]))
    ours.send(pickle.dumps(request))
    data, descriptors = ours.receive()

The fork server, reward workers, tools and local ranks share this framing; what the bytes are is in their modules.
"""

import select
import socket
import struct
from collections.abc import Sequence
from typing import Self

_HEADER = struct.Struct("<QI")  # size in bytes, number of descriptors
_MAX_DESCRIPTORS = 250  # of one system call; Linux accepts up to 253
_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux only


class Channel:
    """One end of a connection. In each direction, one thread at a time may use it."""

    def __init__(self, descriptor: int):
        self._socket = socket.socket(fileno=descriptor)
        self._readable = select.poll()  # `select.select` does not take descriptors above 1023
        self._readable.register(descriptor, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        ours, theirs = socket.socketpair()
        return cls(ours.detach()), cls(theirs.detach())

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with copies of file descriptors. Raises ConnectionError if the other end is closed."""
        header = _HEADER.pack(len(data), len(descriptors))
        for start in range(0, len(descriptors), _MAX_DESCRIPTORS):
            socket.send_fds(self._socket, [header], descriptors[start : start + _MAX_DESCRIPTORS])
            header = b"+"  # descriptors cannot be sent without data
        self._socket.sendall(data if descriptors else header + data)

    def receive(self) -> tuple[bytes, list[int]]:
        """The next message: its bytes and file descriptors. Raises EOFError if the other end is closed."""
        header, descriptors = self._receive_descriptors(_HEADER.size)
        size, count = _HEADER.unpack(header + self._read(_HEADER.size - len(header)))
        while len(descriptors) < count:
            descriptors += self._receive_descriptors(1)[1]
        return self._read(size), descriptors

    def _receive_descriptors(self, size: int) -> tuple[bytes, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, size, _MAX_DESCRIPTORS, _FLAGS)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            raise EOFError("the other process closed the connection")
        return data, descriptors

    def _read(self, size: int) -> bytes:
        chunks = []
        while size:
            chunks.append(self._socket.recv(size, socket.MSG_WAITALL))
            size -= len(chunks[-1])
            if not chunks[-1]:
                raise EOFError("the other process closed the connection during a message")
        return b"".join(chunks)

    def has_message(self, timeout: float | None = 0.0) -> bool:
        """Whether a message or the end of the connection arrives within `timeout` seconds."""
        return bool(self._readable.poll(None if timeout is None else timeout * 1000))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
