"""Continuous batching for `generate_one`: the requests of concurrent coroutines share one batch.

A task of the event loop runs the scheduler. It yields to the loop between iterations, so that new requests are admitted
to the running batch and a finished response resumes its coroutine immediately.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl.rollout.base import Completion, Request, RolloutStats, SamplingParams, is_named
from verl.rollout.native.requests import Row, admission_order

if TYPE_CHECKING:
    from verl.rollout.native.engine import NativeRollout
    from verl.rollout.native.model import Decoder
    from verl.rollout.native.paged_scheduler import PagedScheduler
    from verl.rollout.native.scheduler import SlotScheduler


@dataclass(eq=False)
class _Pending:
    """A request whose coroutine is waiting. row: set once the request has been checked."""

    request: Request
    params: SamplingParams
    future: asyncio.Future[Completion]
    row: Row | None = None


class ContinuousBatch:
    """The `generate_one` requests of one engine.

    A request whose sampling parameters (temperature, top_k, top_p, min_p, stop tokens) differ from those of the running
    batch, or whose sequence does not fit its cache, waits until the batch is done. Later requests wait behind it.
    """

    def __init__(self, engine: "NativeRollout"):
        self.engine = engine
        self.queue: list[_Pending] = []  # in order of arrival
        self.running: dict[int, _Pending] = {}  # by Row.index
        self._count = 0
        self._is_closed = False  # whether new requests wait until the running batch is done
        self._decoder: Decoder | None = None
        self._scheduler: SlotScheduler | PagedScheduler | None = None
        self._task: asyncio.Task | None = None

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    async def submit(self, request: Request) -> Completion:
        pending = _Pending(request, request.params.shared, asyncio.get_running_loop().create_future())
        self.queue.append(pending)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve())
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._drop([pending])
            raise

    def abort(self, request_ids: Sequence[str] | None) -> None:
        requests = [*self.queue, *self.running.values()]
        self._drop([pending for pending in requests if is_named(pending.request, request_ids)])

    def _drop(self, chosen: list[_Pending]) -> None:
        for pending in chosen:
            if pending in self.queue:
                self.queue.remove(pending)
                self._resolve(pending, Completion([], [], "abort"))
        indices = {pending.row.index for pending in chosen if pending.row is not None}
        if self._scheduler is not None and indices & self.running.keys():
            with torch.inference_mode():
                self._scheduler.abort(lambda row: row.index in indices)

    # ---- the task -----------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Run batches until no request is left."""
        start, self.engine.stats = time.perf_counter(), RolloutStats()
        try:
            await asyncio.sleep(0)  # the coroutines that are ready now submit their requests first
            while self.queue:
                await self._serve_batch()
        except BaseException as error:
            pending, self.queue, self.running = [*self.queue, *self.running.values()], [], {}
            if pending:
                self.engine.sleep()  # NaN in the cache must not reach other rows
            for waiting in pending:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.engine.stats.seconds = time.perf_counter() - start
            self._task = self._scheduler = None

    async def _serve_batch(self) -> None:
        """Run one batch: the first request of the queue and all that can share its batch."""
        engine, params = self.engine, self.queue[0].params
        self._decoder = engine.read()
        with ExitStack() as stack:
            with torch.inference_mode():  # the session may copy into inference tensors created by generate()
                stack.enter_context(engine.session())
            rows = self._take_compatible(params)
            if not rows:
                return
            with torch.inference_mode():
                scheduler = self._scheduler = engine.start_continuous(params, rows)
            steps, self._is_closed = 0, False
            while scheduler.is_busy or scheduler.has_results:
                with torch.inference_mode():
                    finished = scheduler.take_finished()  # of an abort
                    if scheduler.is_busy:
                        scheduler.advance()
                        finished += scheduler.take_finished()
                engine.stats.steps += scheduler.steps - steps
                steps = scheduler.steps
                for row, completion in finished:
                    engine.stats.tokens += len(completion.token_ids)
                    self._resolve(self.running.pop(row.index), completion)
                await asyncio.sleep(0)
                self._extend(params)
        self._scheduler = None

    def _extend(self, params: SamplingParams) -> None:
        """Add new requests to the running batch, up to the first one that must wait."""
        if self._is_closed or not self.queue or self.queue[0].params != params:
            return
        before = list(self.queue)
        rows = self._take_compatible(params)
        if not rows:
            return
        with torch.inference_mode():
            fits = self.engine.extend_continuous(self._scheduler, rows)
        if not fits:  # back into the queue until the batch is done
            self._is_closed = True
            for row in rows:
                self.running.pop(row.index)
            taken = {row.index for row in rows}
            self.queue = [p for p in before if p.row is not None and p.row.index in taken] + self.queue

    def _take_compatible(self, params: SamplingParams) -> list[Row]:
        """Take the first requests of the queue that share `params`, as rows in admission order.

        An invalid request fails without affecting the others.
        """
        rows = []
        while self.queue and self.queue[0].params == params:
            pending = self.queue.pop(0)
            try:
                pending.row = Row.of(self._count, pending.request, self._decoder)
            except ValueError as error:
                pending.future.set_exception(error)
                continue
            self._count += 1
            self.running[pending.row.index] = pending
            rows.append(pending.row)
        return admission_order(rows)

    @staticmethod
    def _resolve(pending: _Pending, completion: Completion) -> None:
        if not pending.future.done():
            pending.future.set_result(completion)
