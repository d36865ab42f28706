"""ProcessPool: n processes of this host, each with one worker per role, watched until they end.

One thread of this process reads the answers and looks after the processes:

- an exception on one rank: the others, which may be waiting for it in a collective, are stopped at once, and the
  caller gets the error of the rank that failed first;
- a process that dies is named within a fraction of a second, with the signal or exit status;
- a call that takes longer than `timeout` ends with the stacks of all threads of all ranks;
- the processes end with this one, however it ends.

After any of these the pool is over: its workers' state is not to be trusted, and each later call says why.
"""

import atexit
import concurrent.futures
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

import torch

from verl.single_controller.dispatch import Call
from verl.single_controller.local.column_files import call_parcel, load_result
from verl.single_controller.local.transport import Kind, Message, Parcel, receive, send
from verl.single_controller.placement import visible_devices
from verl.single_controller.worker import Place, WorkerSpec, free_port
from verl.single_controller.worker_group import Future, Trouble, WorkerDied, WorkerError, WorkerTimeout, first_error

_TICK = 0.1  # seconds between two looks at the processes
_SETTLE = 0.25  # seconds in which further failures are still awaited, to tell the first one from those it caused
_GRACE = 5.0  # seconds that a process has to end by itself after STOP
_SIGNAL_NAMES = {s.value: s.name for s in signal.Signals}


@dataclass
class _Process:
    """One rank as the pool sees it."""

    rank: int
    popen: subprocess.Popen
    connection: socket.socket
    stacks: IO[bytes]
    reported_dead: bool = False

    def kill(self) -> None:
        """End the process and everything that it started: they share a process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def read_stacks(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace").strip() or "(no stacks: the process did not answer)"


@dataclass
class _Pending:
    """A call under way. `started`: when the processes came to it, as far as the pool can tell."""

    role: str
    method: str
    waiting: set[int]
    answers: dict[int, Message] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    error: WorkerError | None = None
    started: float | None = None


class ProcessPool:
    """`n` processes with one worker per role of `specs`. Made and ready when the constructor returns.

    timeout: seconds that one call (or the making of the workers) may take; may be changed between calls.
    devices: the GPU numbers that the processes see (rank i uses the i-th); None leaves CUDA_VISIBLE_DEVICES alone.
    env: further variables of the processes, beside those of this one.
    Raises WorkerError when a worker cannot be made.
    """

    def __init__(
        self,
        specs: Mapping[str, WorkerSpec],
        n: int,
        *,
        timeout: float,
        devices: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
    ):
        self.roles = set(specs)
        self.timeout = timeout
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._calls = 0
        self._over: WorkerError | None = None
        self._troubles: list[Trouble] = []
        self._settled_at: float | None = None
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._lifeline, self._life = os.pipe()
        _allow_many_files()
        port = free_port()
        places = [Place(rank, n, rank, n, master_port=port) for rank in range(n)]
        environments = [_environment(place, devices, env or {}) for place in places]
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._serve, args=(environments, started), name="worker watch", daemon=True
        )
        self._thread.start()
        atexit.register(self.stop)
        try:
            started.result()
            messages = [(Kind.START, Parcel((dict(specs), place))) for place in places]
            self._send_all("+".join(specs), "__init__", messages).get()
        except BaseException:
            self.stop()
            raise

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(self, role: str, method: str, calls: list[Call | None]) -> Future[list]:
        """Run `method` of `role` on every rank that has a Call; results in rank order."""
        parcels: dict[tuple, Parcel] = {}  # what several ranks get is packed once
        messages: list[tuple[Kind, Parcel] | None] = [None] * len(calls)
        for rank, call in enumerate(calls):
            if call is not None:
                key = (id(call.args), id(call.kwargs), call.padding)
                if key not in parcels:
                    parcels[key] = call_parcel(role, method, call)
                messages[rank] = (Kind.CALL if call.collect else Kind.SILENT_CALL, parcels[key])
        return self._send_all(role, method, messages)

    def _send_all(self, role: str, method: str, messages: Sequence[tuple[Kind, Parcel] | None]) -> Future[list]:
        """One message to each rank that has one."""
        outgoing = [(process, *message) for process, message in zip(self._processes, messages) if message is not None]
        pending = self._begin(role, method, outgoing)
        return Future(lambda timeout: self._result(pending, len(messages), timeout))

    def _begin(self, role: str, method: str, outgoing: list[tuple[_Process, Kind, Parcel]]) -> _Pending:
        pending = _Pending(role, method, {process.rank for process, _, _ in outgoing})
        with self._lock:  # every rank gets the calls of all threads in the same order, or their collectives would cross
            if self._over is not None:
                reason = f"not called, since its processes were stopped: {str(self._over).splitlines()[0]}"
                raise WorkerError(reason, role, method, self._over.rank) from self._over
            if not self.roles:
                raise WorkerError("not called, since the group was shut down", role, method, 0)
            self._calls += 1
            if not self._pending:
                pending.started = time.monotonic()
            self._pending[self._calls] = pending
            for process, kind, parcel in outgoing:
                with suppress(ConnectionError):  # a process that is gone: the watch sees it and ends this call
                    parcel.send(process.connection, kind, self._calls)
        return pending

    def _result(self, pending: _Pending, n: int, timeout: float | None) -> list:
        if not pending.done.wait(timeout):
            raise TimeoutError(f"{pending.role}.{pending.method}() has not finished after {timeout} s")
        if pending.error is not None:
            raise pending.error
        return [load_result(pending.answers[rank]) if rank in pending.answers else None for rank in range(n)]

    # ---- the watch (its own thread) ---------------------------------------------------------------------------------

    def _serve(self, environments: list[dict[str, str]], started: concurrent.futures.Future) -> None:
        """Start the processes, look after them, and end them when no role is left or when one has failed."""
        try:
            # they inherit it: until a process can write its stacks, the signal that asks for them would end it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            for rank, env in enumerate(environments):
                self._processes.append(_start_process(rank, self._lifeline, env))
                self._selector.register(self._processes[-1].connection, selectors.EVENT_READ, self._processes[-1])
            started.set_result(None)
            while self.roles and self._over is None:
                self._look()
        except BaseException as error:  # the caller must hear of it, since nobody else reads the answers
            if not started.done():
                started.set_exception(error)
            self._over = WorkerError.of(error, "(the watch of the processes)", "", 0)
        finally:
            self._end()

    def _look(self) -> None:
        for key, _ in self._selector.select(_TICK):
            self._read(key.data)
        self._look_for_the_dead()
        self._look_at_the_clock()
        if self._settled_at is not None and time.monotonic() >= self._settled_at:
            self._over = self._first_error()

    def _read(self, process: _Process) -> None:
        try:
            message = receive(process.connection)
        except (EOFError, OSError):  # it is ending; `_look_for_the_dead` will find out how
            self._selector.unregister(process.connection)
            return
        if message.kind is Kind.FAILURE:
            self._trouble(1, *message.load())
            return
        if self._troubles:  # the pool is as good as over: an answer that comes now must not hide it
            return
        with self._lock:
            pending = self._pending[message.call_id]
            pending.answers[process.rank] = message
            pending.waiting.remove(process.rank)
            if not pending.waiting:
                del self._pending[message.call_id]
                for following in list(self._pending.values())[:1]:
                    following.started = following.started or time.monotonic()
                pending.done.set()

    def _look_for_the_dead(self) -> None:
        for process in self._processes:
            status = process.popen.poll()
            if status is None or process.reported_dead:
                continue
            process.reported_dead = True
            role, method = self._doing(process.rank)
            how = (
                f"was killed by {_SIGNAL_NAMES.get(-status, f'signal {-status}')}"
                if status < 0
                else f"exited ({status})"
            )
            if status == -signal.SIGKILL:
                how += "; if no person or scheduler did it, the machine ran out of memory: see `dmesg`"
            error = WorkerDied(f"process {process.popen.pid} {how}", role, method, process.rank)
            self._trouble(0, time.monotonic(), error)

    def _doing(self, rank: int) -> tuple[str, str]:
        """The call that a rank is at, or that it is idle."""
        with self._lock:
            at = next((p for p in self._pending.values() if rank in p.waiting), None)
        return (at.role, at.method) if at is not None else ("+".join(sorted(self.roles)), "(no call)")

    def _look_at_the_clock(self) -> None:
        with self._lock:
            at = next(iter(self._pending.values()), None)
        if at is None or self._troubles or time.monotonic() - at.started < self.timeout:
            return
        for process in self._processes:
            process.popen.send_signal(signal.SIGUSR1)  # faulthandler writes the stacks while `_SETTLE` passes
        silent = sorted(at.waiting)
        answered = sorted(set(at.answers)) or "none"
        message = f"no answer after {self.timeout:g} s from ranks {silent} (answered: {answered}); stacks of all ranks:"
        self._trouble(2, time.monotonic(), WorkerTimeout(message, at.role, at.method, silent[0]))

    def _trouble(self, order: int, when: float, error: WorkerError) -> None:
        """Note an error. The one to show is chosen when things have settled."""
        self._troubles.append((order, when, error))
        if self._settled_at is None:
            self._settled_at = time.monotonic() + _SETTLE

    def _first_error(self) -> WorkerError:
        error = first_error(self._troubles)
        if isinstance(error, WorkerTimeout):
            stacks = "\n\n".join(f"--- rank {p.rank}\n{p.read_stacks()}" for p in self._processes)
            error = WorkerTimeout(error.message, error.role, error.method, error.rank, error.host, stacks)
        return error

    # ---- the end --------------------------------------------------------------------------------------------------

    def release(self, role: str) -> None:
        """One role less; the processes end with the last one."""
        self.roles.discard(role)
        if not self.roles:
            self.stop()

    def stop(self) -> None:
        """End the processes: kindly when they are idle, at once when a call is under way."""
        self.roles.clear()
        self._thread.join()
        atexit.unregister(self.stop)

    def _end(self) -> None:
        """The last thing that the watch does."""
        with self._lock:
            interrupted, self._pending = list(self._pending.values()), {}
        if not interrupted and self._over is None:
            self._say_farewell()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.popen.wait()
            process.connection.close()
            process.stacks.close()
        self._selector.close()
        os.close(self._lifeline)
        os.close(self._life)
        for pending in interrupted:
            reason = "the group was shut down during the call"
            pending.error = self._over or WorkerError(reason, pending.role, pending.method, min(pending.waiting))
            pending.done.set()

    def _say_farewell(self) -> None:
        """Ask the processes to end, so that they can close what they hold, and wait a while for it."""
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            with suppress(OSError):  # it ended before
                send(process.connection, Kind.STOP, 0, None)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(deadline - time.monotonic(), 0))


def _allow_many_files() -> None:
    """Every result with large columns is an open file here (`column_files`): as many as the system allows."""
    if sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _environment(place: Place, devices: Sequence[int] | None, further: Mapping[str, str]) -> dict[str, str]:
    """The variables of one process: this one's, its rank, the same import path, and a fair share of the cores."""
    env = {**os.environ, **further, **place.env, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)}
    if "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // place.local_world_size))
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return env


def _start_process(rank: int, lifeline: int, env: dict[str, str]) -> _Process:
    ours, theirs = socket.socketpair()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115
    inherited = (theirs.fileno(), stacks.fileno(), lifeline)
    command = [sys.executable, "-P", "-m", "verl.single_controller.local.worker_main", *map(str, inherited)]
    try:
        popen = subprocess.Popen(
            command,
            env=env,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the controller, which ends the workers; and killpg reaches all
        )
    finally:
        theirs.close()
    return _Process(rank, popen, ours, stacks)
