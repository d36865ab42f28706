"""How rows are handed to a reward function: in this process under an alarm, in worker processes, or in an event loop.

Every way yields (position, Outcome) pairs, so that the managers know one thing only. A row that hangs is stopped at its
deadline and named; which way stops it depends on the function and on the thread:

- bounded rules of this package, or no timeout: plain calls
- in the main thread: plain calls under an alarm; tracebacks and breakpoints are those of any function (library code
  that never comes back to Python does not hear the alarm: the manager `prime` kills it)
- in another thread (no alarms there), or on request: in worker processes
- `async def`: all rows in one event loop, each with its own deadline
"""

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from verl.rewards.functions import ScoreFunction
from verl.rewards.outcome import Row
from verl.rewards.sandbox.pool import (
    Call,
    DeadlineExceeded,
    Limits,
    Outcome,
    ProcessPool,
    address_of,
    alarm,
    late,
    shared_pool,
)

_GRACE_SECONDS = 2.0  # for an event loop to notice that a row is late


def call_rows(
    function: ScoreFunction, rows: Sequence[Row], timeout: float | None, pool: ProcessPool | None, concurrency: int
) -> Iterator[tuple[int, Outcome]]:
    """Call `function` on every row; yields (position in `rows`, outcome) in the order of the ends.

    timeout: seconds for one row, None for no deadline. pool: run the rows there. concurrency: how many rows of an
    async function are under way at once.
    """
    if pool is None and function.is_async:
        return _call_async(function, rows, timeout, concurrency)
    if pool is None and (timeout is None or function.bounded):
        return _call_here(function, rows, None)
    if pool is None and threading.current_thread() is threading.main_thread():
        return _call_here(function, rows, timeout)
    return _call_in(pool or shared_pool(), function, rows, timeout)


def arguments(function: ScoreFunction, row: Row) -> dict:
    """The keyword arguments of `function` for one row."""
    return function.arguments(row.data_source, row.solution_str, row.ground_truth, row.extra_info)


def _call_here(function: ScoreFunction, rows: Sequence[Row], timeout: float | None) -> Iterator[tuple[int, Outcome]]:
    with alarm() if timeout is not None else nullcontext() as interrupt:
        for position, row in enumerate(rows):
            given = arguments(function, row)
            try:
                if interrupt is None:
                    value = function.func(**given)
                else:
                    value = interrupt(timeout, lambda given=given: function.func(**given))
            except DeadlineExceeded as error:
                outcome = late(timeout, error)
            except (Exception, SystemExit) as error:  # whatever a user's function raises is this row's error
                outcome = Outcome.raised(error)
            else:
                outcome = Outcome(value)
            yield position, outcome


def _call_in(
    pool: ProcessPool, function: ScoreFunction, rows: Sequence[Row], timeout: float | None
) -> Iterator[tuple[int, Outcome]]:
    try:
        address = address_of(function.func)
    except ValueError as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise ValueError(
            "a reward function with a deadline, called outside of the main thread, runs in a process of its own: "
            f"{error}. Or take the deadline away: timeout=null"
        ) from error
    calls = [Call(address, arguments(function, row)) for row in rows]
    return pool.map(calls, Limits(wall_seconds=timeout))


def _call_async(
    function: ScoreFunction, rows: Sequence[Row], timeout: float | None, concurrency: int
) -> Iterator[tuple[int, Outcome]]:
    """All rows in an event loop of their own thread (the caller may be inside a loop already).

    A coroutine that does not come back to the loop blocks all the others. It is found out by the silence: then it is
    given up together with its thread, and the rows that it kept waiting start again in a new loop.
    """
    todo = list(range(len(rows)))
    while todo:
        loop = _Loop(function, rows, todo, timeout, concurrency)
        try:
            while todo:
                try:
                    position, outcome = loop.heard.get(timeout=None if timeout is None else timeout + _GRACE_SECONDS)
                except queue.Empty:
                    blocking = loop.blocking_row()
                    if blocking not in todo:
                        continue
                    todo.remove(blocking)
                    yield blocking, late(timeout)
                    break
                todo.remove(position)
                yield position, outcome
        finally:
            loop.abandon()


class _Loop:
    """An event loop in a daemon thread that scores some rows and tells of each end through `heard`."""

    def __init__(
        self, function: ScoreFunction, rows: Sequence[Row], todo: Sequence[int], timeout: float | None, concurrency: int
    ):
        self.heard: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._function, self._rows, self._timeout = function, rows, timeout
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks = [self._loop.create_task(self._score(i), name=str(i)) for i in todo]
        threading.Thread(target=self._run, name="reward functions", daemon=True).start()

    def blocking_row(self) -> int | None:
        """The row whose coroutine is running at this moment."""
        task = asyncio.current_task(self._loop)
        return None if task is None else int(task.get_name())

    def abandon(self) -> None:
        """Stop what is still under way, as soon as the loop can be reached."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.wait(self._tasks))
        self._loop.close()

    async def _score(self, position: int) -> None:
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout) as deadline:
                    outcome = Outcome(await self._function.func(**arguments(self._function, self._rows[position])))
            except (Exception, SystemExit) as error:  # whatever a user's function raises is this row's error
                late_here = isinstance(error, TimeoutError) and deadline.expired()
                outcome = late(self._timeout, error) if late_here else Outcome.raised(error)
        self.heard.put((position, outcome))
