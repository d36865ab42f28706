"""The process of one rank: makes its workers, runs the calls that come through a socket, and never outlives its parent.

Started by `process_pool`, as `python -m verl.single_controller.local.worker_main SOCKET STACKS LIFELINE`: three
inherited descriptors. SIGUSR1 writes the stacks of all threads to STACKS, also while the process
is stuck in C code. LIFELINE is a pipe that nobody writes to: its end means that the parent is gone.
"""

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from verl.single_controller.dispatch import Call
from verl.single_controller.local.column_files import result_parcel, unpack_call
from verl.single_controller.local.transport import Kind, Message, Parcel, receive
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import WorkerError
from verl.utils.log import setup_worker_logging


def die_with_parent(lifeline: int) -> subprocess.Popen:
    """End this process and all that it started when the parent is gone, however the parent ended.

    A shell does it, in the process group of this process: it works while this process is stuck in C code, and when
    this process is killed at the same moment as its parent.
    """
    return subprocess.Popen(["/bin/sh", "-c", "read line; kill -KILL 0"], stdin=lifeline)


class WorkerHost:
    """The workers of one rank, one per role."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.rank = int(os.environ["RANK"])
        self._doing = ("", "")

    def answer(self, message: Message) -> tuple[Kind, Any]:
        """The reply to a message: the result, or when and how it failed."""
        self._doing = ("worker", "(unpacking the call)")
        try:
            return Kind.RESULT, self._start(message) if message.kind is Kind.START else self._run(message)
        except BaseException as error:  # SystemExit included: a worker that wants to end must be heard of
            return Kind.FAILURE, (time.monotonic(), WorkerError.of(error, *self._doing, self.rank))

    def _start(self, message: Message) -> None:
        specs, place = message.load()
        for role, spec in specs.items():
            self._doing = (role, "__init__")
            self.workers[role] = spec.build(place)

    def _run(self, message: Message) -> Any:
        role, method, padding, *arguments = message.load()
        self._doing = (role, method)
        args, kwargs = unpack_call(message, *arguments)
        result = getattr(self.workers[role], method)(*args, **kwargs)
        return Call(args, kwargs, padding, collect=message.kind is Kind.CALL).finish(result)

    def serve(self, connection: socket.socket) -> None:
        """Answer messages until STOP."""
        while True:
            message = _next(connection)
            if message.kind is Kind.STOP:
                return
            self._reply(connection, message.call_id, *self.answer(message))
            del message  # a rank that waits for its next call holds no batch

    def _reply(self, connection: socket.socket, call_id: int, kind: Kind, content: Any) -> None:
        try:
            parcel = result_parcel(content) if kind is Kind.RESULT else Parcel(content)
        except Exception as error:  # the result cannot be pickled
            error.add_note("while the result was packed for the caller")
            kind, parcel = Kind.FAILURE, Parcel((time.monotonic(), WorkerError.of(error, *self._doing, self.rank)))
        parcel.send(connection, kind, call_id)


def _next(connection: socket.socket) -> Message:
    """The next message; STOP when the parent is gone."""
    try:
        return receive(connection)
    except EOFError:
        return Message(Kind.STOP, 0, b"")


def main() -> None:
    connection, stacks, lifeline = map(int, sys.argv[1:])
    keeper = die_with_parent(lifeline)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the parent started us with it blocked
    host = WorkerHost()
    setup_worker_logging(host.rank)
    host.serve(socket.socket(fileno=connection))
    keeper.kill()
    keeper.wait()


if __name__ == "__main__":
    main()
