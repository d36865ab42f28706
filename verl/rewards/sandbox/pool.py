"""Function calls in other processes, with limits on time, memory and output.

    pool = ProcessPool(4)
    call = Call(address_of(score), {"solution": text})
    outcome = pool.run(call, Limits(wall_seconds=5))             # outcome.value, or outcome.failure
    for position, outcome in pool.map(calls, limits): ...        # in the order in which the calls finish

`verl.rewards.sandbox.worker` is the program of the worker processes. A worker is a fresh interpreter (see
`verl.utils.subprocess_pool`), so it finds a function by its address, and the return value must be picklable.

`interrupt_after` needs no process: it interrupts a function in the main thread with an alarm, which is enough for
functions that are only slow.
"""

import atexit
import contextlib
import inspect
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
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from verl.utils.subprocess_pool import PythonProcess, describe_exit

_CHECK_SECONDS = 0.5  # between checks of the memory and the exit of a worker
START_SECONDS = 300.0  # for a worker to start and import the file of the function: a shared disk can be slow at first


class DeadlineExceeded(BaseException):
    """The alarm of `interrupt_after`. Not an Exception, so that `except Exception` in user code does not catch it."""


class WorkerError(RuntimeError):
    """An exception raised in a worker process; the message has the traceback of that process."""


@dataclass(frozen=True)
class Limits:
    """Limits of one call. None means no limit.

    Attributes:
        wall_seconds: Elapsed time. The worker is killed when it is over.
        cpu_seconds: CPU time of all threads, rounded up.
        memory_bytes: Memory in addition to what the worker used before the call (Linux only). The call raises
            MemoryError.
        resident_bytes: Resident memory of the worker (Linux only), checked every half second. A worker above is killed.
        output_bytes: Output that is kept. The rest is dropped, and the output says so.
    """

    wall_seconds: float | None = None
    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    resident_bytes: int | None = None
    output_bytes: int = 1 << 16


@dataclass(frozen=True)
class Call:
    """A call of the function at `address` (see `address_of`) with keyword arguments.

    Attributes:
        address: The function.
        arguments: Its keyword arguments.
        imports: Addresses of functions that are loaded before the call.
    """

    address: tuple[str, str, str]
    arguments: Mapping[str, Any]
    imports: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a call.

    Attributes:
        value: The return value, if the call succeeded.
        failure: Otherwise, what happened: a predicate whose subject is the function.
        cause: The exception behind the failure, if there is one.
        over_limit: Whether the call exceeded a limit or ended its process.
    """

    value: Any = None
    failure: str | None = None
    cause: BaseException | None = None
    over_limit: bool = False

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
    found = inspect.isfunction(func) or inspect.isclass(func)
    module, name = (func.__module__, func.__qualname__) if found else ("__main__", "")
    if module == "__main__" or vars(sys.modules[module]).get(name) is not func:
        raise ValueError(
            f"{func!r} cannot be called in another process: expected a top-level function of a module or of a file "
            "(given by path and name), not a lambda, an inner function, a callable object or a function of __main__"
        )
    return module, inspect.getfile(func), name


def machine_memory() -> int:
    """Physical memory of the host in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def late(seconds: float, cause: BaseException | None = None) -> Outcome:
    """The outcome of a call that was stopped at its deadline. cause: has the stack of the function, if it is known."""
    return Outcome(failure=f"did not end within {seconds:g} s and was stopped", cause=cause, over_limit=True)


# ---- alarms in this process ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def alarm() -> Iterator[Callable[[float, Callable[[], Any]], Any]]:
    """Yield a function `interrupt(seconds, call)`, which runs `call()` and raises DeadlineExceeded after `seconds`.

    Main thread only, since Python delivers signals there. The signal handler is set once for any number of calls. At
    the end a previous alarm is restored, with its remaining time.
    """
    limit: float | None = None  # of the running call

    def ring(signum, frame):
        if limit is not None:
            raise DeadlineExceeded(f"not done after {limit:g} s")

    def interrupt(seconds: float, call: Callable[[], Any]) -> Any:
        nonlocal limit
        limit = seconds
        try:
            # Repeated every second: a bare `except:` in user code swallows one alarm, not all of them.
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
            try:
                return call()
            finally:
                limit = None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield interrupt
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - start), 1e-3), interval)


def interrupt_after(seconds: float, call: Callable[[], Any]) -> Any:
    """Run one call under an `alarm`."""
    with alarm() as interrupt:
        return interrupt(seconds, call)


# ---- worker processes ---------------------------------------------------------------------------------------------


class _WrongReply(Exception):
    """A worker replied to another call than its current one."""


class _Worker:
    """A worker process, idle or running one call. `deadline`: when the current phase of the call is over time."""

    def __init__(self, shares_cores: bool) -> None:
        self.connection, theirs = Pipe()
        # Many workers share the cores: one thread each, unless the user sets another number.
        environment = {**({"OMP_NUM_THREADS": "1"} if shares_cores else {}), **os.environ}
        with theirs:
            self.process = PythonProcess("verl.rewards.sandbox.worker", [theirs.fileno()], environment)
        self.position = -1
        self.deadline = math.inf
        self.number = 0  # of the current call
        self._ready = False

    def start_call(self, position: int, job: tuple, limits: Limits) -> None:
        """Run a call. A worker that is still starting receives it when it is ready."""
        self.number += 1
        self.position, self._job, self._limits = position, pickle.dumps((self.number, *job)), limits
        self._phase, self.deadline = "start", time.monotonic() + START_SECONDS
        if self._ready:
            self._send()

    def read_message(self) -> Outcome | None:
        """Read one message; the outcome if it ends the call.

        Raises:
            EOFError, ConnectionResetError: The process ended.
            _WrongReply: The message belongs to another call.
        """
        kind, number, *content = pickle.loads(self.connection.recv_bytes())
        if kind != "ready" and number != self.number:
            raise _WrongReply
        if kind == "ready":
            self._ready = True
            self._send()
        elif kind == "called":
            self._phase = "call"
            seconds = self._limits.wall_seconds
            self.deadline = math.inf if seconds is None else time.monotonic() + seconds
        elif kind == "value":
            return _value_outcome(*content)
        else:
            return _error_outcome(self._limits, *content)
        return None

    def deadline_outcome(self) -> Outcome:
        """The outcome of a call that was stopped at its deadline."""
        if self._phase == "start":
            return Outcome(failure=f"could not be loaded in another process within {START_SECONDS:g} s")
        return late(self._limits.wall_seconds)

    def has_ended(self) -> bool:
        """Whether the process has ended without a further message. A fork of it keeps the connection open."""
        return self.process.poll() is not None and not self.connection.poll()

    def memory_outcome(self) -> Outcome | None:
        """The outcome of a call whose worker exceeds its memory limit; None if it does not."""
        limit = self._limits.resident_bytes
        if limit is None or sys.platform != "linux":
            return None
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):  # it has ended
            return None
        if pages * os.sysconf("SC_PAGE_SIZE") <= limit:
            return None
        return Outcome(failure=f"used more than {limit >> 20:,} MiB of memory and was stopped", over_limit=True)

    def exit_outcome(self) -> Outcome:
        """The outcome of a call whose process ended."""
        # The connection is closed before the process has ended: wait for its own exit status, not that of a kill.
        self.process.wait(5.0)
        status = self.kill()
        if status == -signal.SIGXCPU:
            phrase = f"used more than {self._limits.cpu_seconds:g} s of processor time and was stopped"
            return Outcome(failure=phrase, over_limit=True)
        failure = f"ended its process, which {describe_exit(status)}"
        return Outcome(failure=failure, over_limit=self._phase == "call")

    def kill(self) -> int:
        """Kill the process and everything it started. Returns its exit status (negative: the signal)."""
        status = self.process.poll()
        self.process.kill()
        self.connection.close()
        return self.process.wait() if status is None else status

    def _send(self) -> None:
        # If the worker has just ended, reading its next message reports that.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(self._job)


def _value_outcome(value: bytes, output: str) -> Outcome:
    _print(output)
    try:
        return Outcome(value=pickle.loads(value))
    except Exception as error:  # unpickling runs code of the value's class, which can raise anything
        return Outcome(failure="returned a value that cannot be read outside of its process", cause=error)


def _error_outcome(limits: Limits, description: str, trace: str, output: str) -> Outcome:
    _print(output)
    cause = WorkerError(f"in another process\n\n{trace}")
    if description.startswith("MemoryError:") and limits.memory_bytes is not None:
        phrase = f"used more than {limits.memory_bytes >> 20} MiB of memory"
        return Outcome(failure=phrase, cause=cause, over_limit=True)
    return Outcome(failure=f"raised {description}", cause=cause)


def _print(output: str) -> None:
    if output:
        sys.stdout.write(output)


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
                worker.kill()
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
        pending = deque(enumerate(calls))
        busy: dict[Connection, _Worker] = {}
        try:
            while pending or busy:
                for worker in self._acquire(len(pending), wait_for_one=not busy):
                    position, call = pending.popleft()
                    busy[worker.connection] = worker
                    try:
                        job = ((*call.imports, call.address), limits, pickle.dumps(dict(call.arguments)))
                    except Exception as error:  # pickling runs code of the arguments' classes, which can raise anything
                        self._release(busy, worker)
                        failure = "has arguments that cannot be sent to another process"
                        yield position, Outcome(failure=failure, cause=error)
                        continue
                    worker.start_call(position, job, limits)
                yield from self._poll(busy)
        finally:
            for worker in list(busy.values()):
                self._release(busy, worker, alive=False)

    def _acquire(self, wanted: int, wait_for_one: bool) -> Iterator[_Worker]:
        """Up to `wanted` free workers, started if necessary."""
        for _ in range(wanted):
            try:
                slot = self._slots.get(block=wait_for_one)
            except queue.Empty:
                return
            wait_for_one = False
            try:
                # A worker that was killed from outside while it was idle is replaced.
                worker = slot if slot is not None and slot.process.poll() is None else _Worker(self.size > 1)
            except OSError:
                self._slots.put(None)
                raise
            yield worker

    def _release(self, busy: dict[Connection, _Worker], worker: _Worker, alive: bool = True) -> None:
        del busy[worker.connection]
        if not alive:
            worker.kill()
        self._slots.put(worker if alive else None)

    def _poll(self, busy: dict[Connection, _Worker]) -> Iterator[tuple[int, Outcome]]:
        """Wait until a worker sends a message, ends or reaches its deadline; yield the calls that are finished."""
        nearest = min((w.deadline for w in busy.values()), default=0.0)
        timeout = None if nearest == math.inf else max(nearest - time.monotonic(), 0.0)
        timeout = _CHECK_SECONDS if timeout is None else min(timeout, _CHECK_SECONDS)
        for connection in wait(list(busy), timeout):
            worker = busy[connection]
            try:
                outcome, alive = worker.read_message(), True
            except (EOFError, ConnectionResetError):
                outcome, alive = worker.exit_outcome(), False
            except _WrongReply:
                failure = "shares its worker process with another call, which replied in its place"
                outcome, alive = Outcome(failure=f"{failure}: does a function fork this process?"), False
            if outcome is not None:
                self._release(busy, worker, alive)
                yield worker.position, outcome
        for worker in [w for w in busy.values() if w.deadline <= time.monotonic()]:
            self._release(busy, worker, alive=False)
            yield worker.position, worker.deadline_outcome()
        for worker in list(busy.values()):
            outcome = worker.exit_outcome() if worker.has_ended() else worker.memory_outcome()
            if outcome is not None:
                self._release(busy, worker, alive=False)
                yield worker.position, outcome


_shared: dict[int, ProcessPool] = {}
_shared_lock = threading.Lock()


def shared_pool() -> ProcessPool:
    """The pool of this process for occasional calls. A forked child gets its own."""
    with _shared_lock:
        if os.getpid() not in _shared:
            _shared[os.getpid()] = ProcessPool(min(4, os.cpu_count() or 1))
        return _shared[os.getpid()]
