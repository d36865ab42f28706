"""The worker process of `ToolProcesses`: an event loop that runs the calls of many trajectories concurrently.

It reads `ToolSettings` and replies ("ready",) or ("broken", message). Then it reads (number, method, arguments,
seconds), replies ("started", number) when the call starts, and ("value", number, value), ("late", number, hangs) or
("error", number, description). It ends when the channel is closed, even if a tool blocks the event loop.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from verl.agents.tools.function_tool import FunctionTool
from verl.agents.tools.host import ToolHost
from verl.agents.tools.load import describe
from verl.processes.child import Parent
from verl.processes.streams import BoundedText
from verl.utils.redaction import console_text

OUTPUT_CHARACTERS = 1 << 16  # of a worker; the rest is dropped


class _Output(BoundedText):
    """Passes the first characters on to a stream."""

    def __init__(self, stream: TextIO):
        super().__init__(OUTPUT_CHARACTERS)
        self._stream = stream

    def keep(self, text: str) -> None:
        note = "" if self.remaining else "\n[further output of this tool process is dropped]\n"
        self._stream.write(console_text(text) + note)
        self._stream.flush()


async def run_call(
    host: ToolHost,
    reply: Callable[..., None],
    number: int,
    method: str,
    arguments: dict[str, Any],
    seconds: float | None,
) -> None:
    """Run one call of a host and reply with its result."""
    reply("started", number)
    try:
        async with asyncio.timeout(seconds) as deadline:
            value = await getattr(host, method)(**arguments)
        reply("value", number, value)
    except BaseException as error:  # whatever user code raises is the error of this call
        if isinstance(error, TimeoutError) and deadline.expired():
            tool = host.tools.get(arguments.get("name", "")) if method == "execute" else None
            # a function in a thread cannot be cancelled: it still runs
            reply("late", number, isinstance(tool, FunctionTool) and not tool.is_async)
        else:
            reply("error", number, describe(error))


def limit_output() -> None:
    """Drop the output of subprocesses, and that of this process after `OUTPUT_CHARACTERS`."""
    stream = os.fdopen(os.dup(2), "w", errors="replace", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = _Output(stream)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_output()
    parent = Parent()
    settings = parent.receive()
    try:
        host = ToolHost(settings)
    except BaseException as error:  # also sys.exit() of the file
        parent.send("broken", str(error) if isinstance(error, ValueError) else describe(error))
        return
    parent.send("ready")
    tasks: set[asyncio.Task] = set()
    loop = asyncio.new_event_loop()

    def start(call: tuple) -> None:
        task = loop.create_task(run_call(host, parent.send, *call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(
            lambda task: task.cancelled() and parent.send("error", call[0], "CancelledError: by a tool")
        )

    def read_calls() -> None:
        while True:
            loop.call_soon_threadsafe(start, parent.receive())

    threading.Thread(target=read_calls, daemon=True).start()
    while True:
        # a task that raises one of these ends the loop; the others continue
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            loop.run_forever()


if __name__ == "__main__":
    main()
