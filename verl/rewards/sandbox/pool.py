"""Calling a function in a process that can be killed, under limits of time, memory and output.

    ProcessPool.map(calls, limits)   in this process: hands calls to workers, keeps their deadlines, kills
    python -m verl.rewards.sandbox.worker   the worker: calls one function after another
    interrupt_after(seconds, call)   no process: an alarm in the main thread, for functions that are only slow

Workers are fresh interpreters, never forks: a trainer's process holds threads, locks and a CUDA context that no fork
survives. So a function reaches a worker by its address, and what it returns must be picklable.
"""

import atexit
import contextlib
import inspect
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

START_SECONDS = 300.0  # for a worker to start and to import the function's file: a cold shared disk is slow


class DeadlineExceeded(BaseException):
    """The alarm of `interrupt_after`. Not an Exception, so that a user's `except Exception` lets it pass."""


class WorkerError(RuntimeError):
    """An exception raised in a worker; its text carries the traceback that the worker saw."""


@dataclass(frozen=True)
class Limits:
    """What one call may use. None: no limit of that kind.

    wall_seconds: real time; the worker is killed after it. cpu_seconds: processor time of all its threads, rounded up.
    memory_bytes: memory beyond what the worker held before the call (Linux only). output_bytes: what it may print;
    the rest is dropped, and said so.
    """

    wall_seconds: float | None = None
    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    output_bytes: int = 1 << 16


@dataclass(frozen=True)
class Call:
    """One call of the function at `address` with keyword arguments."""

    address: tuple[str, str, str]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a call ended: `value`, or `failure` (a phrase that follows the function's name) and its `cause`.

    over_limit: it was stopped at one of its limits, or took its process down.
    """

    value: Any = None
    failure: str | None = None
    cause: BaseException | None = None
    over_limit: bool = False

    @classmethod
    def raised(cls, error: BaseException) -> "Outcome":
        """The outcome of a call that raised `error` in this process."""
        return cls(failure=f"raised {type(error).__name__}: {str(error)[:2000]}", cause=error)


def address_of(func: Callable) -> tuple[str, str, str]:
    """(module, file, name) by which another process finds `func`.

    Raises ValueError for what has no address: a lambda, a function inside a function, one typed into a notebook or
    defined in the script that was started (a worker that imported that script would run it again).
    """
    module, name = (func.__module__, func.__qualname__) if inspect.isfunction(func) else ("__main__", "")
    if module == "__main__" or vars(sys.modules[module]).get(name) is not func:
        raise ValueError(
            f"{func!r} cannot be called in another process: expected a function at the top level of a module or of a "
            "file of its own (path and name), not a lambda, an inner function, a callable object or one of __main__"
        )
    return module, inspect.getfile(func), name


def late(seconds: float, cause: BaseException | None = None) -> Outcome:
    """The outcome of a call that was stopped at its deadline; `cause` shows where it was, if that is known."""
    return Outcome(failure=f"did not end within {seconds:g} s and was stopped", cause=cause, over_limit=True)


@contextlib.contextmanager
def alarm() -> Iterator[Callable[[float, Callable[[], Any]], Any]]:
    """A function `interrupt(seconds, call)`: `call()`, interrupted by DeadlineExceeded after `seconds`.

    In the main thread only (Python's rule for signals). The handler is set once for many calls; an alarm that someone
    else had set is put back at the end, with the time that is left of it.
    """
    limit: float | None = None  # of the call under way

    def ring(signum, frame):
        if limit is not None:
            raise DeadlineExceeded(f"not done after {limit:g} s")

    def interrupt(seconds: float, call: Callable[[], Any]) -> Any:
        nonlocal limit
        limit = seconds
        try:
            # It rings again every second: a bare `except:` swallows the first ring, not all of them.
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
            try:
                return call()
            finally:
                limit = None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    begun = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield interrupt
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-3), interval)


def interrupt_after(seconds: float, call: Callable[[], Any]) -> Any:
    """One call under an `alarm`."""
    with alarm() as interrupt:
        return interrupt(seconds, call)


class _Worker:
    """One worker process as seen from here: idle, or at work on one call."""

    def __init__(self) -> None:
        self.connection, there = Pipe()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        # Many workers share the cores: each with one thread, unless the user says otherwise.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "verl.rewards.sandbox.worker", str(there.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            start_new_session=True,
            env=environment,
        )
        there.close()
        self.ready = False
        self.number = -1
        self.deadline = math.inf

    def begin(self, number: int, job: bytes, limits: Limits) -> None:
        """Give it a call (pickled). A worker that is still starting gets it when it says that it is ready."""
        self.number, self._job, self._limits = number, job, limits
        self._phase, self.deadline = "start", time.monotonic() + START_SECONDS
        if self.ready:
            self._send()

    def hear(self) -> Outcome | None:
        """Read one message; the outcome if the call has ended by it. EOFError, ConnectionResetError: it is dead."""
        kind, *parts = pickle.loads(self.connection.recv_bytes())
        if kind == "ready":
            self.ready = True
            self._send()
        elif kind == "called":
            self._phase = "call"
            seconds = self._limits.wall_seconds
            self.deadline = math.inf if seconds is None else time.monotonic() + seconds
        elif kind == "value":
            return _returned(*parts)
        else:
            return _raised(self._limits, *parts)
        return None

    def overdue(self) -> Outcome:
        """The outcome of a call that was stopped at its deadline."""
        if self._phase == "start":
            return Outcome(failure=f"could not be loaded in another process within {START_SECONDS:g} s")
        return late(self._limits.wall_seconds)

    def dead(self) -> Outcome:
        """The outcome of a call whose process ended without one."""
        # It has closed its end and is about to be gone: its own status says why, not that of a kill.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        status = self.kill()
        if status == -signal.SIGXCPU:
            phrase = f"used more than {self._limits.cpu_seconds:g} s of processor time and was stopped"
            return Outcome(failure=phrase, over_limit=True)
        reason = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        return Outcome(failure=f"ended its process: {reason}{hint}", over_limit=self._phase == "call")

    def kill(self) -> int:
        """End the process and what it has started; returns its exit status (negative: the signal)."""
        status = self.process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait() if status is None else status

    def _send(self) -> None:
        # A worker that has just died is found out when it is heard.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(self._job)


def _returned(value: bytes, output: str) -> Outcome:
    _show(output)
    try:
        return Outcome(value=pickle.loads(value))
    except Exception as error:  # the value's own class decides what is raised here
        return Outcome(failure="returned a value that cannot be read outside of its process", cause=error)


def _raised(limits: Limits, kind: str, message: str, trace: str, output: str) -> Outcome:
    _show(output)
    cause = WorkerError(f"in another process\n\n{trace}")
    if kind == "MemoryError" and limits.memory_bytes is not None:
        phrase = f"used more than {limits.memory_bytes >> 20} MiB of memory"
        return Outcome(failure=phrase, cause=cause, over_limit=True)
    return Outcome(failure=f"raised {kind}: {message}", cause=cause)


def _show(output: str) -> None:
    if output:
        sys.stdout.write(output)


class ProcessPool:
    """At most `size` workers, started when first needed and kept. May be used from several threads at once."""

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"a process pool needs at least 1 process, found {size}")
        self.size = size
        self._owner = os.getpid()
        # A slot is a worker, or None where one may be started. Last in, first out: the same few stay busy.
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)
        atexit.register(self.close)

    def close(self) -> None:
        """End the idle workers. The pool can be used again. A forked copy of the pool leaves them alone."""
        if os.getpid() != self._owner:
            return
        slots = []
        with contextlib.suppress(queue.Empty):
            while True:
                slots.append(self._slots.get_nowait())
        for worker in slots:
            if worker is not None:
                worker.kill()
            self._slots.put(None)

    def run(self, call: Call, limits: Limits) -> Outcome:
        """One call; waits for its end."""
        return next(outcome for _, outcome in self.map([call], limits))

    def map(self, calls: Sequence[Call], limits: Limits) -> Iterator[tuple[int, Outcome]]:
        """(position, outcome) of every call, in the order in which they end.

        The clock of a call starts when the worker calls the function: starting and importing have a limit of their own.
        Workers that are still busy when the iterator is closed are killed.
        """
        pending = deque(enumerate(calls))
        busy: dict[Connection, _Worker] = {}
        try:
            while pending or busy:
                for worker in self._take(len(pending), wait_for_one=not busy):
                    number, call = pending.popleft()
                    busy[worker.connection] = worker
                    try:
                        job = pickle.dumps((call.address, limits, pickle.dumps(dict(call.arguments))))
                    except Exception as error:  # the arguments' own classes decide what is raised here
                        self._give_back(busy, worker)
                        phrase = "has arguments that cannot be sent to another process"
                        yield number, Outcome(failure=phrase, cause=error)
                        continue
                    worker.begin(number, job, limits)
                yield from self._attend(busy)
        finally:
            for worker in list(busy.values()):
                worker.kill()
                self._give_back(busy, worker, alive=False)

    def _take(self, wanted: int, wait_for_one: bool) -> Iterator[_Worker]:
        """Up to `wanted` free workers, started where there is none yet."""
        for _ in range(wanted):
            try:
                slot = self._slots.get(block=wait_for_one)
            except queue.Empty:
                return
            wait_for_one = False
            try:
                # One that was ended from outside while it was idle is replaced.
                worker = slot if slot is not None and slot.process.poll() is None else _Worker()
            except OSError:
                self._slots.put(None)
                raise
            yield worker

    def _give_back(self, busy: dict[Connection, _Worker], worker: _Worker, alive: bool = True) -> None:
        if not alive:
            worker.kill()
        del busy[worker.connection]
        self._slots.put(worker if alive else None)

    def _attend(self, busy: dict[Connection, _Worker]) -> Iterator[tuple[int, Outcome]]:
        """Wait until a worker speaks, dies or is overdue; yields the calls that have ended by that."""
        nearest = min((w.deadline for w in busy.values()), default=0.0)
        timeout = None if nearest == math.inf else max(nearest - time.monotonic(), 0.0)
        for connection in wait(list(busy), timeout):
            worker = busy[connection]
            try:
                outcome, alive = worker.hear(), True
            except (EOFError, ConnectionResetError):
                outcome, alive = worker.dead(), False
            if outcome is not None:
                self._give_back(busy, worker, alive)
                yield worker.number, outcome
        for worker in [w for w in busy.values() if w.deadline <= time.monotonic()]:
            self._give_back(busy, worker, alive=False)
            yield worker.number, worker.overdue()


_shared: dict[int, ProcessPool] = {}
_shared_lock = threading.Lock()


def shared_pool() -> ProcessPool:
    """The pool of this process for single calls that need isolation. A forked child gets one of its own."""
    with _shared_lock:
        if os.getpid() not in _shared:
            _shared[os.getpid()] = ProcessPool(min(4, os.cpu_count() or 1))
        return _shared[os.getpid()]
