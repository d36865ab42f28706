"""A clock that stands still during pauses, and a wait that is limited by it."""

import asyncio
import time

import pytest

from verl.utils.coroutines import PausableClock, wait_within


def test_pauses_are_not_counted(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = PausableClock()
    start, seen = clock(), []
    clock.resume()  # no effect: it is not paused
    for seconds, change in ((3, clock.pause), (5, clock.pause), (2, clock.resume), (4, clock.pause), (8, clock.resume)):
        now[0] += seconds
        seen.append(clock() - start)
        change()
        assert clock() - start == seen[-1], "a change is not a jump"
    now[0] += 1
    assert [*seen, clock() - start] == [3, 3, 3, 7, 7, 8]


def test_a_wait_ends_with_the_result_the_error_or_the_limit():
    async def run() -> list:
        loop, found = asyncio.get_running_loop(), []
        result, error, never = (loop.create_future() for _ in range(3))
        loop.call_later(0.02, result.set_result, 7)
        loop.call_later(0.02, error.set_exception, KeyError("cause"))
        found.append(await wait_within(result, 5, time.monotonic))
        with pytest.raises(KeyError, match="cause"):
            await wait_within(error, 5, time.monotonic)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            await wait_within(never, 0.2, time.monotonic)
        return [*found, never.cancelled(), time.monotonic() - start]

    value, cancelled, seconds = asyncio.run(run())
    assert value == 7 and cancelled and 0.2 <= seconds < 30


def test_a_limit_does_not_count_pauses():
    async def run() -> tuple[float, float, bool]:
        loop, clock = asyncio.get_running_loop(), PausableClock()
        future, times = loop.create_future(), []

        def pause() -> None:
            clock.pause()
            times.append(time.monotonic())

        def resume() -> None:
            times.append(time.monotonic())
            clock.resume()

        loop.call_later(0.1, pause)
        loop.call_later(0.8, resume)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            await wait_within(future, 0.3, clock)
        return time.monotonic() - start, times[1] - times[0], future.cancelled()

    seconds, paused, cancelled = asyncio.run(run())
    assert paused > 0.5 and 0.3 + paused <= seconds < 30 and cancelled  # 0.1 + 0.7 + 0.2 if no timer is late


def test_cancelling_the_wait_cancels_the_future():
    async def run() -> bool:
        future = asyncio.get_running_loop().create_future()
        wait = asyncio.ensure_future(wait_within(future, 5, time.monotonic))
        await asyncio.sleep(0)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        return future.cancelled()

    assert asyncio.run(run())
