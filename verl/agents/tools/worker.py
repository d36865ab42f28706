"""The worker process of `ToolProcesses`: an event loop that runs the calls of many trajectories concurrently.

Started as `python -m verl.agents.tools.worker FD`, where FD is its end of the connection. It reads pickled
`ToolSettings` and replies ("ready",) or ("broken", message). Then it reads (number, method, arguments, seconds),
replies ("started", number) when the call starts, and ("value", number, value), ("late", number, hangs) or ("error",
number, description). It ends when the connection is closed, even if a tool blocks the event loop.
"""

import asyncio
import contextlib
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl.agents.tools.function_tool import FunctionTool
from verl.agents.tools.host import ToolHost
from verl.agents.tools.runner import describe
from verl.utils.redaction import printable

OUTPUT_CHARACTERS = 1 << 16  # of a worker; the rest is dropped


class BoundedStream(io.TextIOBase):
    """Passes the first characters on to a stream and drops the others."""

    encoding = "utf-8"

    def __init__(self, stream: Any, limit: int):
        self._stream, self._remaining = stream, limit

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._remaining > 0:
            self._stream.write(printable(text[: self._remaining]))
            self._remaining -= len(text)
            if self._remaining <= 0:
                self._stream.write("\n[further output of this tool process is dropped]\n")
            self._stream.flush()
        return len(text)


class ToolWorker:
    """Runs calls of a host.

    Args:
        host: the host.
        reply: sends a message.
    """

    def __init__(self, host: ToolHost, reply: Callable[..., None]):
        self.host, self.reply = host, reply

    async def run_call(self, number: int, method: str, arguments: dict[str, Any], seconds: float | None) -> None:
        """Run one call and reply with its result."""
        self.reply("started", number)
        try:
            async with asyncio.timeout(seconds) as deadline:
                value = await getattr(self.host, method)(**arguments)
            self.reply("value", number, value)
        except BaseException as error:  # whatever user code raises is the error of this call
            if isinstance(error, TimeoutError) and deadline.expired():
                self.reply("late", number, self._hangs(method, arguments))
            else:
                self.reply("error", number, describe(error))

    def _hangs(self, method: str, arguments: dict[str, Any]) -> bool:
        """Whether the call still runs: a function in a thread cannot be cancelled."""
        tool = self.host.tools.get(arguments.get("name", "")) if method == "execute" else None
        return isinstance(tool, FunctionTool) and not tool.is_async


def read_calls(connection: Connection, submit: Callable[[tuple], None]) -> None:
    """Pass calls on until the connection is closed, which ends the process."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            submit(pickle.loads(connection.recv_bytes()))
    os._exit(0)


def limit_output() -> None:
    """Drop the output of subprocesses, and that of this process after `OUTPUT_CHARACTERS`."""
    stream = os.fdopen(os.dup(2), "w", errors="replace", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = BoundedStream(stream, OUTPUT_CHARACTERS)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # if the machine runs out of memory, this process ends, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    connection, worker, lock = Connection(int(sys.argv[1])), os.getpid(), threading.Lock()

    def reply(*message: Any) -> None:
        if os.getpid() != worker:  # a fork that a tool made
            os._exit(0)
        with lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send_bytes(pickle.dumps(message))

    limit_output()
    try:
        host = ToolHost(pickle.loads(connection.recv_bytes()))
    except BaseException as error:  # also sys.exit() of the file
        reply("broken", str(error) if isinstance(error, ValueError) else describe(error))
        return
    reply("ready")
    tasks: set[asyncio.Task] = set()
    tool_worker, loop = ToolWorker(host, reply), asyncio.new_event_loop()

    def start(call: tuple) -> None:
        task = loop.create_task(tool_worker.run_call(*call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() and reply("error", call[0], "CancelledError: by a tool"))

    def submit(call: tuple) -> None:
        loop.call_soon_threadsafe(start, call)

    threading.Thread(target=read_calls, args=(connection, submit), daemon=True).start()
    while True:
        # a task that raises one of these ends the loop; the others continue
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            loop.run_forever()


if __name__ == "__main__":
    main()
