"""Reading ahead: threads prepare the next batches of a source while the trainer works on the last one.

The position of the data never runs ahead: a source draws the items of a batch and asks for exactly these, and batches
prepared for other items are discarded. So a saved position is that of the used batches, and order and contents are
those of reading without threads.
"""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from verl.protocol import DataProto

logger = logging.getLogger("verl.data")

Item = tuple[int, int]
"""(epoch, row number)."""

_LOOK_SECONDS = 0.5  # a wait without a limit cannot be interrupted in a thread other than the main one
_JOIN_SECONDS = 5.0
_MOST_WORKERS = 8


def default_workers() -> int:
    """Number of threads that read images: one per core of this process, at most 8."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


class Prefetcher:
    """Prepares batches in threads.

    Args:
        read: an item -> its row. Called by several threads; with one worker, in the order of the items.
        collate: rows -> a batch.
        workers: threads that read rows. One more collates them.
        batches: how many batches are prepared before they are used. Their contents are in memory.

    Attributes:
        seconds: how long the last batch was in preparation.
    """

    def __init__(
        self,
        read: Callable[[Item], dict[str, Any]],
        collate: Callable[[list[dict[str, Any]]], DataProto],
        workers: int,
        batches: int = 1,
    ):
        self._read, self._collate = read, collate
        self._workers, self._batches = workers, batches
        self._planned: deque[tuple[list[Item], Future[tuple[DataProto, float]]]] = deque()
        self._following: Iterator[list[Item]] = iter(())
        self._lock = threading.Lock()
        self._pools: tuple[_Threads, ...] = ()  # for the rows, and for the batches
        self.seconds = 0.0

    def describe(self) -> str:
        """Text such as "8 threads prepare the next batch"."""
        threads = "1 thread prepares" if self._workers == 1 else f"{self._workers} threads prepare"
        return f"{threads} the next {'batch' if self._batches == 1 else f'{self._batches} batches'}"

    def take(self, items: list[Item], following: Callable[[], Iterator[list[Item]]]) -> DataProto:
        """Return the batch of these items, and begin with those after it.

        Args:
            items: the items.
            following: () -> the items of the batches after it. Called if the batch was not prepared.

        Raises:
            BaseException: the error of the first row that could not be read, as `read` raised it, or of `collate`.
        """
        with self._lock:
            if not self._planned or self._planned[0][0] != items:  # the first batch, or the position has changed
                self._stop()
                self._pools = _Threads("data reader", self._workers), _Threads("data collator", 1)
                self._plan(items)
                self._following = following()
            while len(self._planned) <= self._batches:
                self._plan(next(self._following))
            pools, (_, future) = self._pools, self._planned.popleft()
        while not future.done() and self._pools is pools:
            wait([future], _LOOK_SECONDS)
        try:
            if not future.done():
                raise CancelledError
            batch, self.seconds = future.result()
        except CancelledError:
            raise RuntimeError("reading the data was stopped") from None
        return batch

    def close(self) -> None:
        """Discard the prepared batches, and wait for the end of the threads; a further `take` starts new ones. A `take`
        of another thread that waits for its batch ends with RuntimeError."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        pools, self._pools = self._pools, ()
        self._planned.clear()
        for pool in pools:
            pool.stop()

    def _plan(self, items: list[Item]) -> None:
        readers, collator = self._pools
        rows = [readers.submit(self._read, item) for item in items]
        self._planned.append((items, collator.submit(_collated, self._collate, rows)))


def _collated(collate: Callable[[list[Any]], DataProto], rows: Sequence["Future[Any]"]) -> tuple[DataProto, float]:
    """The batch of rows that are being read, and the seconds since the last one was complete."""
    start = time.monotonic()
    return collate([row.result() for row in rows]), time.monotonic() - start


class _Threads:
    """Like a ThreadPoolExecutor, whose threads a program that ends would wait for, even if a read hangs."""

    def __init__(self, name: str, count: int):
        self._tasks: SimpleQueue[tuple[Future, Callable, tuple] | None] = SimpleQueue()
        threads = [threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        # also at the end of the interpreter: a thread that is in C code then would break it
        self.stop = weakref.finalize(self, _end, self._tasks, threads)

    def submit(self, function: Callable, *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._tasks.put((future, function, arguments))
        return future


def _work(tasks: SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        del task, future, function, arguments  # a thread that waits keeps no batch and no source


def _end(tasks: SimpleQueue, threads: list[threading.Thread]) -> None:
    """Cancel the tasks that have not begun, and wait for the threads."""
    with suppress(Empty):
        while True:
            tasks.get_nowait()[0].cancel()
    for _ in threads:
        tasks.put(None)
    limit = time.monotonic() + _JOIN_SECONDS
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(limit - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in others):
        logger.warning("a thread is still reading a row of the data, and ends with it")
