"""Function calls in other processes, with limits on time, memory and output.

    pool = ProcessPool(4)
    call = Call(address_of(score), {"solution": text})
    outcome = pool.run(call, Limits(wall_seconds=5))             # outcome.value, or outcome.failure
    for position, outcome in pool.map(calls, limits): ...        # in the order in which the calls finish

`verl.rewards.sandbox.worker` is the program of the worker processes (see `verl.processes.child`). A worker is a fresh
interpreter, so it finds a function by its address, and the return value must be picklable.
"""

import atexit
import contextlib
import inspect
import logging
import math
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import psutil

from verl.processes.child import (
    EXIT_SECONDS,
    START_SECONDS,
    Channel,
    HelperProcess,
    describe_exit,
    process_status,
    resident_memory,
)
from verl.processes.streams import print_printable

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.5  # between checks of the memory and the exit of a worker
_MESSAGE_CALLS = 128  # that a worker receives in one message
STOPPED_SECONDS = 10.0  # after which a worker that is stopped (SIGSTOP) is killed


class WorkerError(RuntimeError):
    """An exception raised in a worker process; the message has the traceback of that process."""


@dataclass(frozen=True)
class Limits:
    """Limits of one call. None means no limit."""

    wall_seconds: float | None = None  # elapsed time. The worker is killed when it is over.
    cpu_seconds: float | None = None  # CPU time of all threads, rounded up
    # memory in addition to what the worker used before the call (Linux only). The call raises MemoryError.
    memory_bytes: int | None = None
    # resident memory of the worker and its child processes (Linux only), checked every half second. A worker above is
    # killed, with its children.
    resident_bytes: int | None = None
    output_bytes: int = 1 << 16  # output that is kept. The rest is dropped, and the output says so.


@dataclass(frozen=True)
class Call:
    """A call of the function at `address` (see `address_of`) with keyword arguments."""

    address: tuple[str, str, str]
    arguments: Mapping[str, Any]
    imports: tuple[tuple[str, str, str], ...] = ()  # addresses of functions that are loaded before the call


@dataclass(frozen=True)
class Outcome:
    """The result of a call."""

    value: Any = None  # the return value, if the call succeeded
    failure: str | None = None  # otherwise, what happened: a predicate whose subject is the function
    cause: BaseException | None = None  # the exception behind the failure, if there is one
    over_limit: bool = False  # whether the call exceeded a limit or ended its process

    @classmethod
    def raised(cls, error: BaseException) -> "Outcome":
        """The outcome of a call that raised `error` in this process."""
        return cls(failure=f"raised {describe_error(error)}", cause=error)


def describe_error(error: BaseException) -> str:
    """The type and message of an exception; the type alone if its `__str__` fails."""
    try:
        return f"{type(error).__name__}: {str(error)[:2000]}"
    except Exception:  # user code
        return f"{type(error).__name__} (its __str__ fails)"


def address_of(func: Callable) -> tuple[str, str, str]:
    """(module, file, name), by which another process can find `func`.

    Raises:
        ValueError: The function has no address: a lambda, an inner function, a callable object, or a function of
            `__main__` (a worker that imports the main script would run it again).
    """
    has_name = inspect.isfunction(func) or inspect.isclass(func)
    module, name = (func.__module__, func.__qualname__) if has_name else ("__main__", "")
    if module == "__main__" or vars(sys.modules[module]).get(name) is not func:
        raise ValueError(
            f"{func!r} cannot be called in another process: expected a top-level function of a module or of a file "
            "(given by path and name), not a lambda, an inner function, a callable object or a function of __main__"
        )
    return module, inspect.getfile(func), name


def late(seconds: float, cause: BaseException | None = None) -> Outcome:
    """The outcome of a call that was stopped at its deadline. cause: has the stack of the function, if it is known."""
    return Outcome(failure=f"did not end within {seconds:g} s and was stopped", cause=cause, over_limit=True)


class _ProcessOver(Exception):
    """A process must be killed. outcome: of its running call; None: the call has not begun, and may be sent again."""

    def __init__(self, outcome: Outcome | None):
        self.outcome = outcome


class _Worker(HelperProcess):
    """A worker process, idle or running calls one after the other.

    Attributes:
        positions: Positions of the calls without an outcome; the first one is running.
        deadline: When the current phase of the running call is over time.
    """

    def __init__(self, shares_cores: bool) -> None:
        # Many workers share the cores: one thread each, unless the user sets another number.
        super().__init__("verl.rewards.sandbox.worker", **({"OMP_NUM_THREADS": "1"} if shares_cores else {}))
        self.positions: deque[int] = deque()
        self.deadline = math.inf
        self._checked = time.monotonic()  # when its exit and memory were checked last
        self._number = 0  # of the running call
        self._stopped = 0.0  # seconds for which the process was stopped, by the checks
        self._ready = False

    def start_calls(self, positions: Sequence[int], jobs: Sequence[tuple], limits: Limits) -> None:
        """Run calls, (addresses, pickled arguments) each. A worker that starts receives them when it is ready."""
        self.positions, self._limits = deque(positions), limits
        self._number += 1
        self._message = pickle.dumps((self._number, limits, jobs))
        self._is_called = False
        self._start_clock()
        if self._ready:
            self.send(self._message)

    def read_outcome(self, kind: str, number: int, *content: Any) -> Outcome | None:
        """The outcome of the running call, if a message has it. Raises _ProcessOver if it belongs to another call."""
        if kind == "ready":
            self._ready = True
            self.send(self._message)
            return None
        if number != self._number:
            failure = "shares its worker process with another call, which replied in its place"
            raise _ProcessOver(Outcome(failure=f"{failure}: does a function fork this process?"))
        if kind == "called":
            self._is_called = True
            self._start_clock()
            return None
        self._number += 1
        self._start_clock()
        *content, output = content
        if output:
            print_printable(output)
        return value_outcome(*content) if kind == "value" else _error_outcome(self._limits, *content)

    def _start_clock(self) -> None:
        seconds = self._limits.wall_seconds if self._is_called else START_SECONDS
        self.deadline = math.inf if seconds is None else time.monotonic() + seconds

    def check(self) -> None:
        """Raise _ProcessOver if the running call is over a limit, or if the process has ended or is stopped."""
        now, limit = time.monotonic(), self._limits.resident_bytes
        if self.deadline <= now:
            load_failure = f"could not be loaded in another process within {START_SECONDS:g} s"
            raise _ProcessOver(late(self._limits.wall_seconds) if self._is_called else Outcome(failure=load_failure))
        if now - self._checked < _CHECK_SECONDS:
            return
        self._checked = now
        if self.has_ended():
            raise _ProcessOver(self.exit_outcome())
        if limit is not None and all(resident_memory(self.pid, shared_once) > limit for shared_once in (False, True)):
            failure = f"used more than {limit >> 20:,} MiB of memory and was stopped"
            raise _ProcessOver(Outcome(failure=failure, over_limit=True))
        is_stopped = process_status(self.pid) == psutil.STATUS_STOPPED
        self._stopped = self._stopped + _CHECK_SECONDS if is_stopped else 0.0
        if self._stopped >= STOPPED_SECONDS:
            logger.warning("process %d of a reward function is stopped (SIGSTOP): it is killed", self.pid)
            failure = f"did not end: its process {self.pid} was stopped by SIGSTOP"
            raise _ProcessOver(Outcome(failure=failure, over_limit=True) if self._is_called else None)

    def exit_outcome(self) -> Outcome:
        """The outcome of a call whose process has ended."""
        status = self.end(EXIT_SECONDS)
        if status == -signal.SIGXCPU:
            phrase = f"used more than {self._limits.cpu_seconds:g} s of processor time and was stopped"
            return Outcome(failure=phrase, over_limit=True)
        return Outcome(failure=f"ended its process, which {describe_exit(status)}", over_limit=self._is_called)


def value_outcome(value: bytes) -> Outcome:
    """The outcome of a call that returned a value, from the pickled value."""
    try:
        return Outcome(value=pickle.loads(value))
    except Exception as error:  # unpickling runs code of the value's class, which can raise anything
        return Outcome(failure="returned a value that cannot be read outside of its process", cause=error)


def _error_outcome(limits: Limits, description: str, trace: str) -> Outcome:
    cause = WorkerError(f"in another process\n\n{trace}")
    if description.startswith("MemoryError:") and limits.memory_bytes is not None:
        phrase = f"used more than {limits.memory_bytes >> 20} MiB of memory"
        return Outcome(failure=phrase, cause=cause, over_limit=True)
    return Outcome(failure=f"raised {description}", cause=cause)


class ProcessPool:
    """Up to `size` workers, started on demand and reused. Can be used from several threads at the same time."""

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"a process pool needs at least 1 process, found {size}")
        self.size = size
        self._owner = os.getpid()
        # A slot is a worker, or None if one may be started. Last in, first out, to reuse as few workers as possible.
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)
        atexit.register(self.close)

    def close(self) -> None:
        """Kill the idle workers. The pool can be used again. In a forked copy of the pool this does nothing."""
        if os.getpid() != self._owner:
            return
        slots = []
        with contextlib.suppress(queue.Empty):
            while True:
                slots.append(self._slots.get_nowait())
        for worker in slots:
            if worker is not None:
                worker.end()
            self._slots.put(None)

    def run(self, call: Call, limits: Limits) -> Outcome:
        """Run one call and wait for its outcome."""
        return next(outcome for _, outcome in self.map([call], limits))

    def map(self, calls: Sequence[Call], limits: Limits) -> Iterator[tuple[int, Outcome]]:
        """Run calls in parallel.

        Closing the iterator kills the workers that are still busy.

        Args:
            calls: The calls.
            limits: Limits of each call. Starting a worker and importing the function do not count; they have a limit of
                `START_SECONDS`.

        Yields:
            (position in `calls`, outcome), in the order in which the calls finish.
        """
        return _Run(self, calls, limits).outcomes()

    def acquire(self, wait_for_one: bool) -> _Worker | None:
        """A free worker, started if necessary; None if all are busy."""
        try:
            slot = self._slots.get(block=wait_for_one)
        except queue.Empty:
            return None
        try:
            # A worker that was killed from outside while it was idle is replaced.
            return slot if slot is not None and slot.poll() is None else _Worker(self.size > 1)
        except OSError:
            self._slots.put(None)
            raise

    def release(self, worker: _Worker, alive: bool) -> None:
        """Return a worker to the pool. alive: whether it can be used again; otherwise it is killed."""
        if not alive:
            worker.end()
        self._slots.put(worker if alive else None)


class _Run:
    """The calls of one `ProcessPool.map`: those that are pending, and the workers that run the others."""

    def __init__(self, pool: ProcessPool, calls: Sequence[Call], limits: Limits):
        self._pool, self._calls, self._limits = pool, calls, limits
        self._pending = deque(range(len(calls)))
        self._busy: dict[Channel, _Worker] = {}

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """Run all calls; yield (position, outcome)."""
        try:
            while self._pending or self._busy:
                while self._pending and (worker := self._pool.acquire(wait_for_one=not self._busy)):
                    self._busy[worker.channel] = worker
                    yield from self._start(worker)
                yield from self._poll()
        finally:
            for worker in list(self._busy.values()):
                self._release(worker, alive=False)

    def _start(self, worker: _Worker) -> Iterator[tuple[int, Outcome]]:
        """Start the next pending calls on a worker; yield those that cannot be sent."""
        positions, jobs = [], []
        # of several workers: half of the worker's share of the rest, so that a slow call delays few others
        share = 2 * self._pool.size if self._pool.size > 1 else 1
        count = max(1, min(_MESSAGE_CALLS, len(self._pending) // share))
        while self._pending and len(jobs) < count:
            position = self._pending.popleft()
            call = self._calls[position]
            try:
                keywords = pickle.dumps(dict(call.arguments))
            except Exception as error:  # pickling runs code of the arguments' classes, which can raise anything
                failure = "has arguments that cannot be sent to another process"
                yield position, Outcome(failure=failure, cause=error)
                continue
            positions.append(position)
            jobs.append(((*call.imports, call.address), keywords))
        if jobs:
            worker.start_calls(positions, jobs, self._limits)
        else:
            self._release(worker)

    def _poll(self) -> Iterator[tuple[int, Outcome]]:
        """Wait until a worker sends a message, ends or reaches its deadline; yield the calls that are finished."""
        nearest = min((w.deadline for w in self._busy.values()), default=0.0)
        for channel in wait(list(self._busy), min(max(nearest - time.monotonic(), 0.0), _CHECK_SECONDS)):
            yield from self._read(self._busy[channel])
        for worker in [w for w in self._busy.values() if not w.channel.has_message()]:
            try:
                worker.check()
            except _ProcessOver as over:
                yield from self._stop(worker, over.outcome)

    def _read(self, worker: _Worker) -> Iterator[tuple[int, Outcome]]:
        """Read the messages of a worker; yield the calls that are finished."""
        try:
            while worker.positions and (message := worker.receive(0.0)) is not None:
                if (outcome := worker.read_outcome(*message)) is None:
                    continue
                position = worker.positions.popleft()
                if not worker.positions:  # released before the yield: the caller may stop iterating
                    self._release(worker)
                yield position, outcome
        except EOFError:
            yield from self._stop(worker, worker.exit_outcome())
        except _ProcessOver as over:
            yield from self._stop(worker, over.outcome)

    def _stop(self, worker: _Worker, outcome: Outcome | None) -> Iterator[tuple[int, Outcome]]:
        """End a worker with the outcome of its running call, if it has one. Its other calls are sent again."""
        self._release(worker, alive=False)
        position = None if outcome is None else worker.positions.popleft()
        self._pending.extendleft(reversed(worker.positions))
        if outcome is not None:
            yield position, outcome

    def _release(self, worker: _Worker, alive: bool = True) -> None:
        del self._busy[worker.channel]
        self._pool.release(worker, alive)


_shared: dict[int, ProcessPool] = {}
_shared_lock = threading.Lock()


def shared_pool() -> ProcessPool:
    """The pool of this process for occasional calls. A forked child gets its own."""
    with _shared_lock:
        if os.getpid() not in _shared:
            _shared[os.getpid()] = ProcessPool(min(4, os.cpu_count() or 1))
        return _shared[os.getpid()]
