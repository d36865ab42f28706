"""Runs the application with uvicorn: in the foreground until a signal, or in a thread."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

logger = logging.getLogger("verl.server")

#: seconds to finish running calls when the server is stopped
SHUTDOWN_SECONDS = 30


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

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
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}: choose another --host or --port") from None
    return sock


def _server(app: ASGIApp, shutdown_seconds: int) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
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
