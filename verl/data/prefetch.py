"""Reading ahead: threads prepare the next batches of a source while the trainer works on the last one.

The position of the data never runs ahead: a source draws the items of a batch and asks for exactly these, and batches
prepared for other items are discarded. So a saved position is that of the used batches, and order and contents are
those of reading without threads.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from verl.protocol import DataProto

logger = logging.getLogger("verl.data")

Item = tuple[int, int]
"""(epoch, row number)."""

_LOOK_SECONDS = 0.5  # a wait without a limit cannot be interrupted in a thread other than the main one
_JOIN_SECONDS = 5.0
_MOST_WORKERS = 8
_OPEN: "weakref.WeakSet[Prefetcher]" = weakref.WeakSet()


def default_workers() -> int:
    """Number of threads that read images: one per core of this process, at most 8."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


class Prefetcher:
    """Prepares batches in threads.

    A thread lives only while there are rows to read.

    Args:
        read: an item -> its row. Called by several threads; with one worker, in the order of the items.
        collate: rows -> a batch.
        workers: maximum number of threads.
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
        self._planned: deque[_Batch] = deque()
        self._current: _Batch | None = None
        self._following: Iterator[list[Item]] = iter(())
        self._lock = threading.Lock()
        self._tasks: deque[tuple[_Batch, int]] = deque()  # rows that no thread has begun to read
        self._threads: set[threading.Thread] = set()
        self.seconds = 0.0
        _OPEN.add(self)

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
            BaseException: the error of the first row that could not be read, as `read` raised it.
        """
        with self._lock:
            if not self._planned or self._planned[0].items != items:  # the first batch, or the position has changed
                self._discard()
                self._plan(items)
                self._following = following()
            while len(self._planned) <= self._batches:
                self._plan(next(self._following))
            self._start()
            batch = self._current = self._planned.popleft()
        try:
            return batch.result()
        finally:
            self.seconds, self._current = batch.seconds, None

    def close(self) -> None:
        """Discard the prepared batches, and wait for the end of the threads. A further `take` starts new ones.

        A `take` of another thread that waits for its batch ends with RuntimeError.
        """
        with self._lock:
            self._discard()
            if self._current is not None:
                self._current.cancel()
            threads = list(self._threads)
        limit = time.monotonic() + _JOIN_SECONDS
        for thread in threads:
            thread.join(max(limit - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in threads):
            logger.warning("a thread is still reading a row of the data, and ends with it")

    # the callers of these hold the lock

    def _discard(self) -> None:
        self._tasks.clear()
        self._planned.clear()

    def _plan(self, items: list[Item]) -> None:
        batch = _Batch(items, self._read, self._collate)
        self._planned.append(batch)
        self._tasks.extend((batch, position) for position in range(len(items)))

    def _start(self) -> None:
        """Start as many threads as there are rows for."""
        for _ in range(min(self._workers, len(self._tasks)) - len(self._threads)):
            thread = threading.Thread(target=self._run, name="data reader", daemon=True)
            thread.start()
            self._threads.add(thread)  # it removes itself, which needs the lock

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._threads.remove(threading.current_thread())
                    return
                batch, position = self._tasks.popleft()
            batch.read(position)


class _Batch:
    """A batch in preparation. Its rows are read by several threads; the last of them collates the batch."""

    def __init__(
        self,
        items: list[Item],
        read: Callable[[Item], dict[str, Any]],
        collate: Callable[[list[dict[str, Any]]], DataProto],
    ):
        self.items = items
        self._read, self._collate = read, collate
        self._rows: list[Any] = [None] * len(items)
        self._lock = threading.Lock()
        self._remaining = len(items)
        self._failed = len(items)  # the first row that could not be read
        self._error: BaseException | None = None
        self._batch: DataProto | None = None
        self._done = threading.Event()
        self._start: float | None = None
        self.seconds = 0.0

    def read(self, position: int) -> None:
        """Read a row; the last one collates. Errors are kept for `result`."""
        self._start = self._start or time.monotonic()
        if position < self._failed:  # the error of a later row is never raised
            try:
                self._rows[position] = self._read(self.items[position])
            except BaseException as error:
                with self._lock:
                    if position < self._failed:
                        self._failed, self._error = position, error
        with self._lock:
            self._remaining -= 1
            if self._remaining:
                return
        try:
            if self._error is None:
                self._batch = self._collate(self._rows)
        except BaseException as error:
            self._error = error
        self._rows = []
        self.seconds = time.monotonic() - self._start
        self._done.set()

    def cancel(self) -> None:
        """End the wait of another thread for this batch."""
        with self._lock:
            self._failed, self._error = -1, RuntimeError("reading the data was stopped")
        self._done.set()

    def result(self) -> DataProto:
        """Wait for the batch. Raises the error of its first row that could not be read, or of `collate`."""
        while not self._done.wait(_LOOK_SECONDS):
            pass
        if self._error is not None:
            raise self._error
        return self._batch


@atexit.register
def _close_all() -> None:
    """End the threads before the interpreter: one that is in C code would break its end."""
    for each in list(_OPEN):
        each.close()
