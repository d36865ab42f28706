"""Call a reward function on many samples: in this process under an alarm, in worker processes, or in an event loop.

All ways yield (index, Outcome) pairs. A call that exceeds its timeout is stopped and reported. How it is stopped
depends on the function and on the thread:

- bounded functions, or no timeout: direct calls
- main thread: direct calls under an alarm signal, with normal tracebacks and breakpoints. The alarm does not interrupt
  library code that never returns to Python; the manager `prime` kills it.
- another thread, where signals are not available, or if a pool is given: worker processes
- `async def`: all samples in one event loop, with a timeout each, in this process or in a worker process
"""

import asyncio
import logging
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psutil

from verl.rewards.functions import ScoreFunction
from verl.rewards.outcome import Sample
from verl.rewards.sandbox.pool import (
    Call,
    Limits,
    Outcome,
    ProcessPool,
    WorkerError,
    address_of,
    late,
    shared_pool,
    value_outcome,
)
from verl.rewards.sandbox.worker import call_function, load_function, pickled

logger = logging.getLogger("verl.rewards")

_GRACE_SECONDS = 2.0  # time for an event loop to report a timeout itself


# ---- time limits in the main thread ------------------------------------------------------------------------------


class DeadlineExceeded(BaseException):
    """The alarm of `interrupt_after`. Not an Exception, so that `except Exception` in user code does not catch it."""


@contextmanager
def alarm() -> Iterator[Callable[[float, Callable[[], Any]], Any]]:
    """Yield a function `interrupt(seconds, call)`, which runs `call()` and raises DeadlineExceeded after `seconds`.

    Main thread only, since Python delivers signals there. The signal handler is set once for any number of calls. At
    the end a previous alarm is restored, with its remaining time.
    """
    limit: float | None = None  # seconds of the running call

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


# ---- calls --------------------------------------------------------------------------------------------------------


class Isolation:
    """Selects the process of custom functions: a worker, which keeps their state between calls, or this one.

    Args:
        mode: "process" or "none".
        memory_limit_mb: Limit of the resident memory of the worker process, MiB; None: half of the host memory.
    """

    def __init__(self, mode: str, memory_limit_mb: int | None):
        if mode not in ("process", "none"):
            raise ValueError(f"reward manager: isolation: expected 'process' or 'none', found {mode!r}")
        self.mode = mode
        self.memory_bytes = memory_limit_mb << 20 if memory_limit_mb else psutil.virtual_memory().total // 2
        self._pool = ProcessPool(1)
        self._pools: dict[int, ProcessPool | None] = {}  # by the id of a function

    def pool_for(self, function: ScoreFunction) -> ProcessPool | None:
        """The pool in which `function` is called; None: it is called in this process."""
        if self.mode == "none" or function.is_builtin or function.bounded:
            return None
        key = id(function.func)
        if key not in self._pools:
            self._pools[key] = self._pool
            try:
                remote_caller(function)
            except ValueError as error:
                self._pools[key] = None
                logger.info("the reward function %s is called in the trainer's process: %s", function.location, error)
        return self._pools[key]


def call_samples(
    function: ScoreFunction,
    samples: Sequence[Sample],
    timeout: float | None,
    pool: ProcessPool | None,
    concurrency: int,
    memory_bytes: int | None = None,
) -> Iterator[tuple[int, Outcome]]:
    """Call `function` on every sample; yields (index, outcome) in order of completion.

    Args:
        timeout: Seconds per call; None for no timeout.
        pool: Run the calls in these worker processes.
        concurrency: Maximum number of concurrent calls of an async function.
        memory_bytes: Limit of the resident memory of a worker process.
    """
    values = [(s.data_source, s.solution_str, s.ground_truth, s.extra_info, s.prompt) for s in samples]
    keywords, limits = [function.arguments(*each) for each in values], Limits(timeout, resident_bytes=memory_bytes)
    if pool is None and not function.is_async:
        limit = None if function.bounded else timeout
        if limit is None or threading.current_thread() is threading.main_thread():
            return _call_in_process(function.func, keywords, limit)
    if not function.is_async:
        return _call_in(pool or shared_pool(), function, keywords, limits)
    if pool is None:
        return call_async([partial(function.func, **values) for values in keywords], timeout, concurrency)
    return _call_async_in(pool, function, keywords, limits, concurrency)


def _call_in_process(
    func: Callable, keywords: Sequence[dict[str, Any]], timeout: float | None
) -> Iterator[tuple[int, Outcome]]:
    with alarm() if timeout is not None else nullcontext(lambda _, call: call()) as interrupt:
        for index, values in enumerate(keywords):
            try:
                outcome = Outcome(interrupt(timeout, partial(func, **values)))
            except DeadlineExceeded as error:
                outcome = late(timeout, error)
            except (Exception, SystemExit) as error:  # any error of a user's function is an error of this sample
                outcome = Outcome.raised(error)
            yield index, outcome


def _call_in(
    pool: ProcessPool, function: ScoreFunction, keywords: list[dict[str, Any]], limits: Limits
) -> Iterator[tuple[int, Outcome]]:
    try:
        calls = list(map(remote_caller(function), keywords))
    except ValueError as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise ValueError(
            "a reward function with a timeout that is called outside of the main thread runs in a separate process: "
            f"{error}. To disable the timeout: timeout=null"
        ) from error
    return pool.map(calls, limits)


def remote_caller(function: ScoreFunction) -> Callable[[dict[str, Any]], Call]:
    """Makes the calls of a function in a worker process from keyword arguments; what they share is computed once.

    Raises:
        ValueError: The function has no address.
    """
    func, constructor_kwargs = function.source or (function.func, None)
    address = address_of(func)
    rules = [(name, address_of(rule.func), rule.kwargs) for name, rule in function.rules.items()]
    # A sum finds its registered terms by name: the worker imports the files that register them.
    terms = [term.source[0] if term.source else term.func for term in function.terms if not term.is_builtin]
    imports = (*map(address_of, terms), address)
    caller, spec = address_of(call_function), pickle.dumps((address, constructor_kwargs, rules))
    return lambda keywords: Call(caller, {"spec": spec, "keywords": keywords}, imports)


def _call_async_in(
    pool: ProcessPool, function: ScoreFunction, keywords: list[dict[str, Any]], limits: Limits, concurrency: int
) -> Iterator[tuple[int, Outcome]]:
    """Run all samples in an event loop of one worker process. If a call ends the process, all samples fail."""
    rounds, timeout = -(-len(keywords) // concurrency) + 1, limits.wall_seconds
    # The event loop enforces the timeout of each call; this limit is for a loop that is blocked.
    seconds = None if timeout is None else (timeout + _GRACE_SECONDS) * max(rounds, len(keywords))
    spec = remote_caller(function)({}).arguments["spec"]
    values = {"spec": spec, "keywords": keywords, "timeout": timeout, "concurrency": concurrency}
    outcome = pool.run(Call(address_of(run_async), values), replace(limits, wall_seconds=seconds))
    if outcome.failure is not None:
        yield from ((index, outcome) for index in range(len(keywords)))
        return
    for index, each in outcome.value:
        yield index, value_outcome(each.value) if each.failure is None else each


def run_async(
    spec: bytes, keywords: list[dict[str, Any]], timeout: float | None, concurrency: int
) -> list[tuple[int, Outcome]]:
    """In a worker process: call an async function with each of the keyword arguments. The values are pickled."""
    calls, results = [partial(load_function(spec), **values) for values in keywords], []
    for index, outcome in call_async(calls, timeout, concurrency):
        if outcome.failure is None:
            try:
                outcome = Outcome(pickled(outcome.value))
            except TypeError as error:
                outcome = Outcome.raised(error)
        if outcome.cause is not None:  # as text: the trainer may not be able to import its class
            trace = "".join(traceback.format_exception(outcome.cause))[-20000:]
            outcome = replace(outcome, cause=WorkerError(f"in another process\n\n{trace}"))
        results.append((index, outcome))
    return results


def call_async(
    calls: Sequence[Callable[[], Awaitable[Any]]], timeout: float | None, concurrency: int
) -> Iterator[tuple[int, Outcome]]:
    """Await the calls in an event loop in a separate thread, since the caller may be inside a loop.

    A coroutine that never yields blocks all others. If no result arrives in time, the blocking coroutine is abandoned
    with its thread, and the remaining samples are restarted in a new loop.
    """
    todo = list(range(len(calls)))
    while todo:
        loop = _Loop(calls, todo, timeout, concurrency)
        try:
            while todo:
                try:
                    index, outcome = loop.results.get(timeout=None if timeout is None else timeout + _GRACE_SECONDS)
                except queue.Empty:
                    blocking = loop.blocking_sample()
                    if blocking not in todo:
                        continue
                    todo.remove(blocking)
                    yield blocking, late(timeout)
                    break
                todo.remove(index)
                yield index, outcome
        finally:
            loop.abandon()


class _Loop:
    """An event loop in a daemon thread that scores samples and puts (index, outcome) into `results`."""

    def __init__(self, calls: Sequence[Callable], todo: Sequence[int], timeout: float | None, concurrency: int):
        self.results: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._calls, self._timeout = calls, timeout
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks = [self._loop.create_task(self._run_one(i), name=str(i)) for i in todo]
        for task in self._tasks:
            task.add_done_callback(self._report)
        threading.Thread(target=self._run, name="reward functions", daemon=True).start()

    def blocking_sample(self) -> int | None:
        """Return the index of the sample whose coroutine is running now."""
        task = asyncio.current_task(self._loop)
        return None if task is None else int(task.get_name())

    def abandon(self) -> None:
        """Cancel the remaining tasks as soon as the loop responds."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not all(task.done() for task in self._tasks):
            # These two, raised in a task that a user's function created, also end the loop. The function that awaits
            # the task gets them too.
            with suppress(KeyboardInterrupt, SystemExit):
                self._loop.run_until_complete(asyncio.wait(self._tasks))
        self._loop.close()

    def _report(self, task: asyncio.Task) -> None:
        """Put the outcome of a task that has ended, in whatever way, into the results."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self.results.put((int(task.get_name()), Outcome.raised(error) if error is not None else task.result()))

    async def _run_one(self, index: int) -> Outcome:
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout) as deadline:
                    return Outcome(await self._calls[index]())
            except BaseException as error:  # whatever a user's function raises is an error of this sample
                timed_out = isinstance(error, TimeoutError) and deadline.expired()
                return late(self._timeout, error) if timed_out else Outcome.raised(error)
