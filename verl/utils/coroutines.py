"""Coroutines: a clock that can be paused for their time limits, and how they run together."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_POLL = 0.1  # seconds between two checks of a paused clock


class PausableClock:
    """Seconds since an arbitrary time, without those from `pause` to `resume`."""

    def __init__(self) -> None:
        self._paused_at: float | None = None
        self._paused = 0.0  # seconds, of the pauses that have ended

    def __call__(self) -> float:
        now = time.monotonic() if self._paused_at is None else self._paused_at
        return now - self._paused

    def pause(self) -> None:
        """Stop the clock until `resume`. No effect if it is paused."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Let the clock continue. No effect if it is not paused."""
        if self._paused_at is not None:
            self._paused += time.monotonic() - self._paused_at
            self._paused_at = None


#: the clock of the generation that an agent loop runs in, paused while a weight sync or a validation has interrupted
#: the requests
GENERATION_CLOCK: ContextVar[Callable[[], float]] = ContextVar("generation clock", default=time.monotonic)


async def wait_within(future: "asyncio.Future[T]", seconds: float, clock: Callable[[], float]) -> T:
    """The result of a future, which is cancelled if it takes longer, or if the caller is cancelled.

    Args:
        future: to wait for.
        seconds: the limit.
        clock: returns seconds; the limit is measured by it.

    Raises:
        TimeoutError: the limit was exceeded.
    """
    end = clock() + seconds
    try:
        while not future.done():
            left = end - clock()
            if left <= 0:
                raise TimeoutError
            await asyncio.wait([future], timeout=max(left, _POLL))
        return future.result()
    finally:
        future.cancel()


# ---- coroutines -----------------------------------------------------------------------------------------------------


async def gather_coroutines(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results. The first error cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, even if an event loop is already running (as in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return ThreadPoolExecutor(1, "rollout").submit(asyncio.run, coroutine).result()
