"""The process of one rank: makes its workers, runs the calls that come through a socket, and never outlives its parent.

Started by `process_pool`, as `python -m verl.single_controller.worker_process SOCKET STACKS LIFELINE PARENT_PID`:
the first three are inherited descriptors. SIGUSR1 writes the stacks of all threads to STACKS, also while the process
is stuck in C code. LIFELINE is a pipe that nobody writes to: its end means that the parent is gone.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from verl.single_controller.dispatch import Call
from verl.single_controller.transport import Kind, Message, receive, send
from verl.single_controller.worker import Worker

_PR_SET_PDEATHSIG = 1


def die_with_parent(lifeline: int, parent: int) -> None:
    """End this process and all that it started when the parent is gone, however the parent ended."""
    if sys.platform == "linux":
        # the kernel's own promise, which holds even when Python's lock is never released again
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
    if os.getppid() != parent:
        os.killpg(os.getpgrp(), signal.SIGKILL)


def describe_failure(error: BaseException, rank: int, role: str, method: str) -> dict[str, Any]:
    """What the caller is told: text only, since the error's class may not be importable there."""
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the frame of this module
    return {
        "role": role,
        "rank": rank,
        "method": method,
        "host": socket.gethostname(),
        "message": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(type(error), error, own)),
        "when": time.monotonic(),
    }


class WorkerHost:
    """The workers of one rank, one per role."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.rank = int(os.environ["RANK"])
        self._doing = ("", "")

    def answer(self, message: Message) -> tuple[Kind, Any]:
        """The reply to a message: the result, or the description of the failure."""
        self._doing = ("worker", "(unpacking the call)")
        try:
            return Kind.RESULT, self._start(message) if message.kind is Kind.START else self._run(message)
        except BaseException as error:  # SystemExit included: a worker that wants to end must be heard of
            return Kind.FAILURE, describe_failure(error, self.rank, *self._doing)

    def _start(self, message: Message) -> None:
        specs, place = message.load()
        for role, spec in specs.items():
            self._doing = (role, "__init__")
            self.workers[role] = spec.build(place)

    def _run(self, message: Message) -> Any:
        role, method, args, kwargs, padding = message.load()
        self._doing = (role, method)
        result = getattr(self.workers[role], method)(*args, **kwargs)
        return Call(args, kwargs, padding, collect=message.kind is Kind.CALL).finish(result)

    def serve(self, connection: socket.socket) -> None:
        """Answer messages until STOP."""
        while (message := receive(connection)).kind is not Kind.STOP:
            kind, content = self.answer(message)
            try:
                send(connection, kind, message.call_id, content)
            except OSError:
                raise
            except Exception as error:  # the result cannot be pickled
                error.add_note("while the result was packed for the caller")
                send(connection, Kind.FAILURE, message.call_id, describe_failure(error, self.rank, *self._doing))


def main() -> None:
    connection, stacks, lifeline, parent = map(int, sys.argv[1:])
    die_with_parent(lifeline, parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the parent started us with it blocked
    WorkerHost().serve(socket.socket(fileno=connection))


if __name__ == "__main__":
    main()
