"""The process of one rank: constructs the workers and runs the calls that arrive through a socket.

Started by `process_pool` as `python -m verl.single_controller.local.worker_main CHANNEL LIFELINE [OUTPUT] REPORTS`, or
forked with these arguments: inherited file descriptors. LIFELINE is a pipe to which nothing is written: end of file
means that the parent has ended. OUTPUT is where stdout and stderr go. For REPORTS see `start_reports`.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from verl.processes.child import Channel, start_reports
from verl.processes.streams import redact_output
from verl.single_controller.dispatch import Call
from verl.single_controller.local.transport import FileSource, Kind, Message, Parcel, receive
from verl.single_controller.remote_batch import load_call, loads, pack_result
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import WorkerError
from verl.utils.log import setup_worker_logging
from verl.utils.redaction import learn_secrets


def ignore_interruptions() -> None:
    """Leave SIGINT and SIGTERM to the controller, which ends this process after the step in flight.

    Slurm and systemd signal every process of a job. The handler does nothing: unlike SIG_IGN, programs that this
    process starts do not inherit it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)


class WorkerHost:
    """The workers of one rank, one per role."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.rank = int(os.environ["RANK"])
        self._current_call = ("", "")
        self._started = 0.0

    def handle(self, message: Message) -> tuple[Kind, Any]:
        """Handle a message. Returns (RESULT, result), or (FAILURE, (time, error))."""
        self._current_call, self._started = ("worker", "(unpacking the call)"), time.time()
        try:
            return Kind.RESULT, self._start(message) if message.kind is Kind.START else self._run(message)
        except BaseException as error:  # including SystemExit: a worker that calls sys.exit() is reported
            return Kind.FAILURE, (time.monotonic(), WorkerError.from_exception(error, *self._current_call, self.rank))

    def _start(self, message: Message) -> None:
        secrets, packed = message.load()
        learn_secrets(secrets)
        specs, rank_env = loads(*packed)
        for role, spec in specs.items():
            self._current_call = (role, "__init__")
            self.workers[role] = spec.build(rank_env)

    def _run(self, message: Message) -> Any:
        role, method, padding, packed = message.load()
        self._current_call = (role, method)
        args, kwargs = load_call(packed, list(map(FileSource, message.files)))
        return Call(args, kwargs, padding, collect=message.kind is Kind.CALL).run(self.workers, role, method)

    def serve(self, channel: Channel) -> None:
        """Handle messages until STOP, or until the parent ends."""
        with suppress(EOFError):
            while (message := receive(channel)).kind is not Kind.STOP:
                self._reply(channel, message.call_id, *self.handle(message))
                del message  # free the batch before waiting for the next call

    def _reply(self, channel: Channel, call_id: int, kind: Kind, content: Any) -> None:
        try:
            span = self._started, time.time()  # by the clock of this host
            parcel = Parcel((*pack_result(content), span) if kind is Kind.RESULT else content)
        except Exception as error:  # the result cannot be pickled
            error.add_note("while the result was packed for the caller")
            failure = WorkerError.from_exception(error, *self._current_call, self.rank)
            kind, parcel = Kind.FAILURE, Parcel((time.monotonic(), failure))
        parcel.send(channel, kind, call_id)


def main() -> None:
    channel, lifeline, *output, reports = map(int, sys.argv[1:])
    for descriptor in output:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    ignore_interruptions()
    # Kills this process and everything it started when the parent ends, however it ends. It is a shell in the process
    # group of this process: it works while this process is stuck in C code, or is killed together with its parent.
    watchdog = subprocess.Popen(["/bin/sh", "-c", "trap '' INT TERM; read line; kill -KILL 0"], stdin=lifeline)
    start_reports(reports)
    redact_output()
    host = WorkerHost()
    setup_worker_logging(host.rank)
    host.serve(Channel(channel))
    watchdog.kill()
    watchdog.wait()


if __name__ == "__main__":
    main()
