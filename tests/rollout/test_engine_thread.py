"""The thread of an engine: results, cancellation, failures, exclusive calls and its end."""

import asyncio
import concurrent.futures
import time

import pytest

from verl.rollout.engine_thread import EngineThread


@pytest.fixture
def thread():
    thread = EngineThread("engine")
    yield thread
    thread.close()
    assert not thread.is_alive()


async def forever(ends: list[str] | None = None) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        if ends is not None:
            ends.append("ended")


async def value(result: int) -> int:
    return result


def test_a_future_that_is_cancelled_cancels_its_coroutine(thread):
    ends: list[str] = []
    future = thread.submit(forever(ends))
    assert thread.run_until_complete(value(3)) == 3
    assert thread._thread.daemon, "Python waits for all other threads before it ends"
    future.cancel()
    assert thread.run_until_complete(value(4)) == 4 and ends == ["ended"]


def test_a_failure_ends_running_and_later_coroutines():
    failures: list[str] = []
    thread = EngineThread("engine", on_failure=lambda: failures.append("failed"))
    running, error = thread.submit(forever()), OSError("the process has ended")
    thread.fail(error)
    for future in (running, thread.submit(value(1))):
        with pytest.raises(OSError, match="the process has ended") as caught:
            future.result(10)
        assert caught.value is error
    assert thread.error is error and error.__context__ is None and failures == ["failed"]
    thread.close()


def test_system_exit_of_a_coroutine_ends_the_thread_and_reaches_who_waits():
    async def exits() -> None:
        raise SystemExit(3)

    thread = EngineThread("engine")
    waiting = thread.submit(forever())
    with pytest.raises(SystemExit):
        thread.run_until_complete(exits())
    with pytest.raises(RuntimeError, match=r"the thread has ended: SystemExit\(3\)"):
        waiting.result(10)
    thread.close()
    assert not thread.is_alive() and isinstance(thread.error, SystemExit)


def test_a_thread_that_is_closed_while_it_ends_still_cancels_its_coroutines(thread):
    """After an exit the loop runs on until the other coroutines are cancelled, some of which take a while for that."""

    async def exits() -> None:
        raise SystemExit(3)

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            ends.append("ended")

    async def exits_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise SystemExit(4)

    ends: list[str] = []
    thread.submit(slow_to_end())
    thread.submit(exits_when_cancelled())
    with pytest.raises(SystemExit):
        thread.run_until_complete(exits())
    thread.close()
    assert ends == ["ended"]


def test_exclusive_calls_take_turns(thread):
    order: list[str] = []

    async def note(text: str) -> str:
        order.append(text)
        return text

    def call(name: str) -> None:
        with thread.exclusive(note(f"close {name}"), lambda: note(f"reopen {name}")) as closed:
            time.sleep(0.05)
            order.append(closed.replace("close", "in"))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(call, "ab"))
    first, second = order[0][-1], order[3][-1]
    assert order == [f"{step} {name}" for name in (first, second) for step in ("close", "in", "reopen")]


def test_the_end_cancels_what_runs():
    ends: list[str] = []
    thread = EngineThread("engine")
    future = thread.submit(forever(ends))
    thread.run_until_complete(value(0))
    thread.close()
    thread.close()  # once
    assert ends == ["ended"] and future.cancelled() and "it has ended" in thread.position()
