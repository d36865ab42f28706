"""`RolloutEngine.generate_one` over `generate`: concurrent requests form one batch."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.rollout.request import Completion, Request


@dataclass(eq=False)
class _Waiting:
    """A request whose coroutine is waiting. aborted: its completion, once it has been aborted."""

    request: "Request"
    future: "asyncio.Future[Completion]"
    aborted: "Completion | None" = None


class GatheredRequests:
    """Collects the concurrent requests of an event loop for one call of `complete`.

    Event loops of several threads take turns.

    Args:
        complete: requests -> one completion per request. Its errors reach every request of the call.
    """

    def __init__(self, complete: Callable[[Sequence["Request"]], "list[Completion]"]):
        self._complete = complete
        self._waiting: dict[asyncio.AbstractEventLoop, list[_Waiting]] = {}
        self._turn = threading.Lock()

    async def submit(self, request: "Request") -> "Completion":
        loop = asyncio.get_running_loop()
        for closed in [other for other in list(self._waiting) if other.is_closed()]:
            self._waiting.pop(closed, None)
        waiting = self._waiting.setdefault(loop, [])
        if not waiting:
            loop.call_soon(self._flush, loop)  # after the coroutines that are ready now have submitted theirs
        mine = _Waiting(request, loop.create_future())
        waiting.append(mine)
        return await mine.future

    def abort(self, matches: Callable[["Request"], bool], completion: "Completion") -> None:
        """Abort waiting requests with this completion. Thread-safe: their event loop resolves them."""
        for waiting in list(self._waiting.values()):
            for each in list(waiting):
                if matches(each.request):
                    each.aborted = completion

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._turn:
            batch = []
            for each in self._waiting.pop(loop):
                if each.future.done():
                    continue
                if each.aborted is not None:
                    each.future.set_result(each.aborted)
                else:
                    batch.append(each)
            if not batch:
                return
            try:
                completions = self._complete([each.request for each in batch])
            except BaseException as error:
                for each in batch:
                    fail(each.future, error)
                if not isinstance(error, Exception):
                    raise
                return
        for each, completion in zip(batch, completions, strict=True):
            each.future.set_result(completion)


def fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    """Deliver an error to the coroutine that waits for `future`; one that is not an `Exception` cancels it."""
    if future.done():
        return
    if isinstance(error, StopIteration):  # cannot be raised into a future
        wrapped = RuntimeError("the rollout engine raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    elif isinstance(error, Exception):
        future.set_exception(error)
    else:
        future.cancel()
