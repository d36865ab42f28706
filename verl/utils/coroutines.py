"""Coroutines that run together, and from code without an event loop."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


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
    outcome: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="rollout")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]
