"""The thread of an engine: an event loop for coroutines that other threads and event loops start.

    thread = EngineThread("sglang")
    future = thread.submit(complete(request))     # cancelling the future cancels the coroutine
    response = thread.run_until_complete(complete(request))
    with thread.exclusive(close(), reopen):       # nothing is generated meanwhile
        load_weights()
    thread.close()

The server, SGLang's service, vLLM's stepper and the rollout service each have one. What they do in it differs, and so
does what a pause waits for; starting, cancelling, failing and ending is here.
"""

import asyncio
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_POLL_SECONDS = 0.1  # between two checks that the thread is alive
_GRACE_SECONDS = 3.0  # after the limit of a coroutine, for its own error


class EngineThread:
    """An event loop in a daemon thread, which starts at once.

    Args:
        name: of the thread.
        device: its current device; None: the default.
        on_failure: called in the thread after a failure.
    """

    def __init__(
        self, name: str, device: torch.device | None = None, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.loop = asyncio.new_event_loop()
        #: the error that every later call raises; None: no failure
        self.error: BaseException | None = None
        self._on_failure = on_failure
        self._device = device
        self._tasks: set[asyncio.Task] = set()  # of the coroutines that were submitted
        self._is_serving = True
        self._turn = threading.RLock()  # of exclusive calls
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    # ---- from any thread ----------------------------------------------------------------------------------------

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the thread, after earlier calls, and do not wait for it."""
        self.loop.call_soon_threadsafe(function, *args)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine in the thread. Cancelling the future cancels it; a failure is its result."""
        return asyncio.run_coroutine_threadsafe(self._run(coroutine), self.loop)

    def run_until_complete(self, coroutine: Coroutine[Any, Any, T], limit: float = math.inf) -> T:
        """Run a coroutine in the thread, and wait for it up to `limit` seconds. It should raise an error itself, which
        says more.

        Raises:
            TimeoutError: the thread does not answer. The message says where it is.
            BaseException: of the coroutine, or of a failure.
        """
        future, latest = self.submit(coroutine), time.monotonic() + limit + _GRACE_SECONDS
        while not future.done() and self.is_alive():
            wait([future], _POLL_SECONDS)
            if time.monotonic() > latest and not future.done():
                raise TimeoutError(
                    f"{self._thread.name}: expected an answer of its event loop within {limit:g} s, found "
                    f"{self.position()}"
                )
        if not future.done():
            raise self.error or RuntimeError(f"thread {self._thread.name!r} has ended")
        return future.result()

    def fail(self, error: BaseException) -> None:
        """End all running and later coroutines with this error. Also from the handler of a signal."""
        self.call(self._fail, error)

    @contextmanager
    def exclusive(self, close: Coroutine[Any, Any, T], reopen: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[T]:
        """Context between two coroutines of the thread: one that stops generation, whose result it yields, and one that
        allows it again. One thread at a time."""
        with self._turn:
            closed = self.run_until_complete(close)
            try:
                yield closed
            finally:
                self.run_until_complete(reopen())

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def position(self) -> str:
        """The thread and the function that it is in, with the lines of its last three calls."""
        frame = sys._current_frames().get(self._thread.ident)
        calls = [] if frame is None else traceback.extract_stack(frame)[-3:]
        position = " > ".join(f"{call.name} ({call.filename}:{call.lineno})" for call in calls)
        return f"thread {self._thread.name!r} in {position or 'no function: it has ended'}"

    def stop(self) -> None:
        """Let the thread cancel all coroutines and end, without waiting for it."""
        with suppress(RuntimeError):  # it has ended
            self.call(self._stop_serving)

    def close(self, cancel: bool = True) -> None:
        """Cancel all coroutines, or wait for them, and end the thread."""
        if not cancel and self.is_alive():
            self.run_until_complete(_end_others(cancel))
        self.stop()
        self._thread.join()

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is a property of a thread
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a task end the loop
            self._fail(error)
        self._is_serving = False
        while asyncio.all_tasks(self.loop):
            try:
                self.loop.run_until_complete(_end_others(cancel=True))
            except BaseException as error:  # of another task that ends the loop
                self._fail(error)
        self.loop.close()

    def _stop_serving(self) -> None:
        if self._is_serving:  # otherwise the loop runs to cancel the last coroutines, and ends after that
            self.loop.stop()

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        _cancel(self._tasks)
        self._on_failure()

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            if self.error is None:
                return await coroutine
        except asyncio.CancelledError:
            if self.error is None:
                raise
        finally:
            coroutine.close()
            self._tasks.discard(task)
        # not above, where the cancellation would become its context
        raise self.error if isinstance(self.error, Exception) else RuntimeError(f"the thread has ended: {self.error!r}")


async def _end_others(cancel: bool) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    _cancel(others if cancel else ())
    if others:  # not gather, which would pass on its own cancellation
        done, _ = await asyncio.wait(others)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it


def _cancel(tasks: Iterable[asyncio.Task]) -> None:
    for task in tasks:
        if not task.cancelling():  # a second cancellation would interrupt its cleanup
            task.cancel()
