"""Runs a rollout engine in a thread with its own event loop, for callers in another event loop."""

import asyncio
import threading
from collections.abc import Sequence

from verl.rollout.base import RolloutEngine
from verl.rollout.request import Completion, Request, check_completions


class EngineLoop:
    """Runs `generate_one` and `abort` of an engine in one thread.

    A decode step does not delay the server, and HTTP does not delay a decode step.
    """

    def __init__(self, engine: RolloutEngine):
        self.engine = engine
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollout engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    async def generate(self, request: Request) -> Completion:
        """Generate one response. Cancelling the caller cancels the request."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._generate(request), self.loop))

    async def _generate(self, request: Request) -> Completion:
        completion = await self.engine.generate_one(request)
        check_completions([request], [completion])
        return completion

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests; None: all of them."""
        self.loop.call_soon_threadsafe(self.engine.abort, request_ids)

    def close(self) -> None:
        """Abort all requests and end the thread."""
        if self.loop.is_closed():
            return
        self.abort()
        asyncio.run_coroutine_threadsafe(_finish_tasks(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _finish_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
