"""Runs the application with uvicorn: in the foreground until a signal, or in a thread."""

import asyncio
import logging
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("verl.server")

#: seconds to finish running calls when the server is stopped
SHUTDOWN_SECONDS = 3
#: seconds to receive the head of the first request of a connection, that of a further one, and its body
HEAD_SECONDS, KEEP_ALIVE_SECONDS, BODY_SECONDS = 20, 75, 120
#: seconds in which the rest of a refused request is read and dropped
LINGER_SECONDS = 30
#: connections that may wait to be accepted, and those that are accepted at once: few, so that new ones can replace
#: others before there are too many open files
_QUEUE, _ACCEPTED_AT_ONCE = 2048, 16


class _Connection(H11Protocol):
    """A connection that is closed if it does not send a whole request in time.

    When all connections are in use, a new one replaces the one that has waited for its request for the longest time.
    """

    is_lingering = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_LingeringTransport(self, transport))
        self._expect_request(HEAD_SECONDS)
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            states = h11.IDLE, h11.SEND_BODY, h11.ERROR
            waiting = [other for other in self.connections if other.conn.their_state in states]
            oldest = min(waiting, key=lambda other: other.since)
            self.connections.discard(oldest)  # it is lost later, and must not be chosen again
            oldest.transport.abort()

    def _expect_request(self, head_seconds: float) -> None:
        self.since = self.loop.time()
        self._deadlines = [
            self.loop.call_later(head_seconds, self._close_in, h11.IDLE),
            self.loop.call_later(head_seconds + BODY_SECONDS, self._close_in, h11.SEND_BODY),
        ]

    def _close_in(self, state: type) -> None:
        """Close the connection if the client still is in this state."""
        if self.conn.their_state is state:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self.is_lingering:
            super().data_received(data)

    def linger(self) -> None:
        """Read and drop what the client still sends, until it closes the connection."""
        self.is_lingering = True
        self._forget_deadlines()
        self._deadlines = [self.loop.call_later(LINGER_SECONDS, self.transport.abort)]

    def on_response_complete(self) -> None:
        if not self.is_lingering:
            self._forget_deadlines()
            self._expect_request(KEEP_ALIVE_SECONDS)
        super().on_response_complete()

    def _forget_deadlines(self) -> None:
        for deadline in self._deadlines:
            deadline.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_deadlines()
        super().connection_lost(error)

    def shutdown(self) -> None:
        """Finish the running call; a request that is not complete is not waited for."""
        if self.is_lingering or self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()
        else:
            super().shutdown()


class _LingeringTransport:
    """A transport whose `close` does not reset a connection on which the client still sends.

    TCP drops a response that the client has not read when data arrives at a closed socket. So only the sending half is
    closed until the client closes the other one.
    """

    def __init__(self, connection: _Connection, transport: asyncio.Transport):
        self._connection, self._transport = connection, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._connection.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self._connection.conn.their_state not in (h11.SEND_BODY, h11.ERROR) or self.is_closing():
            self._transport.close()
            return
        self._connection.linger()
        self._transport.write_eof()
        self._transport.resume_reading()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():  # the backlog of uvicorn is also the number of connections accepted at once
            sock.listen(_QUEUE)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 chooses a free port. Raises ValueError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_QUEUE)
    except OSError as error:
        sock.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}: choose another --host or --port") from None
    return sock


def _server(app: ASGIApp, shutdown_seconds: int) -> _Server:
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        backlog=_ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_seconds,
        server_header=False,
    )
    return _Server(config)


def serve_until_signal(app: ASGIApp, sock: socket.socket, shutdown_seconds: int = SHUTDOWN_SECONDS) -> int:
    """Serve until SIGINT or SIGTERM: running calls are finished first, for at most `shutdown_seconds`.

    A second signal ends them at once. Returns the signal.
    """
    received: list[int] = []

    async def run() -> None:
        server, loop = _server(app, shutdown_seconds), asyncio.get_running_loop()

        def stop(number: int) -> None:
            received.append(number)
            server.should_exit = True
            server.force_exit = len(received) > 1
            logger.info("%s: stopping", signal.Signals(number).name)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        await server.serve(sockets=[sock])

    asyncio.run(run())
    return received[0] if received else 0


class ServerThread:
    """The application in a thread. `with ServerThread(app) as server: server.url`."""

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", port: int = 0):
        self._socket = listen(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self.loop = asyncio.new_event_loop()
        self._server = _server(app, shutdown_seconds=1)
        self._thread = threading.Thread(target=self._run, name="rollout server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._server.serve(sockets=[self._socket]))
        self.loop.close()

    def close(self) -> None:
        """Stop. Running calls have one second to finish."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> "ServerThread":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
