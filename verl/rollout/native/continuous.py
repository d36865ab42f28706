"""Continuous batching for `generate_one`: the requests of concurrent coroutines share one batch.

A task of the event loop runs the scheduler. It yields to the loop between iterations, so that new requests are admitted
to the running batch and a finished response resumes its coroutine immediately.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl.rollout.base import RolloutStats
from verl.rollout.gathering import fail
from verl.rollout.native.requests import Row, admission_order
from verl.rollout.request import Completion, Request, SamplingParams, matches_ids
from verl.rollout.stop_strings import SEARCH_INTERVAL

if TYPE_CHECKING:
    from verl.rollout.native.decoder import Decoder
    from verl.rollout.native.engine import NativeRollout
    from verl.rollout.native.paged_scheduler import PagedScheduler
    from verl.rollout.native.scheduler import SlotScheduler


@dataclass(eq=False)
class _Pending:
    """A request whose coroutine is waiting. row: set once the request has been checked."""

    request: Request
    params: SamplingParams
    future: asyncio.Future[Completion]
    row: Row | None = None
    reported: int = 0  # tokens passed to request.on_tokens


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
        self._is_serving = False
        self._task: asyncio.Task | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # of the event loop

    def is_busy(self) -> bool:
        """Whether requests are waiting or running."""
        self._forget_dead_task()
        return bool(self.queue) or self._is_serving  # in this order: serving starts before it takes from the queue

    async def submit(self, request: Request) -> Completion:
        loop = asyncio.get_running_loop()
        pending = _Pending(request, request.params.shared, loop.create_future())
        with self.engine.lock:
            self.engine.check_not_generating("generate_one()")
            self._forget_dead_task()
            if self._task is None:
                self._loop, self._task = loop, loop.create_task(self._serve())
            elif self._loop is not loop:
                raise ValueError(
                    "generate_one() was called in a second event loop while requests of the first are running: use one "
                    "event loop per engine, or wait for them"
                )
            self._thread = threading.get_ident()
            self.queue.append(pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._drop([pending])
            raise

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """Thread-safe: requests are aborted in their event loop."""
        with self.engine.lock:
            self._forget_dead_task()
            if self._task is None:
                return
            if threading.get_ident() != self._thread:
                self._loop.call_soon_threadsafe(self._abort, request_ids)
                return
        self._abort(request_ids)

    def _abort(self, request_ids: Sequence[str] | None) -> None:
        requests = [*self.queue, *self.running.values()]
        self._drop([pending for pending in requests if matches_ids(pending.request, request_ids)])

    def _forget_dead_task(self) -> None:
        """Reset if the task cannot continue: its event loop was closed, or it was cancelled before its first step."""
        if self._task is None or not (self._loop.is_closed() or self._task.done()):
            return
        pending, self.queue, self.running = [*self.queue, *self.running.values()], [], {}
        loop = self._loop
        self._task.get_coro().close()  # leaves the session of the engine
        self.engine.free()
        if not loop.is_closed():
            for waiting in pending:
                loop.call_soon_threadsafe(waiting.future.cancel)
        self._task = self._loop = self._scheduler = self._decoder = None
        self._is_serving = False

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
            self._is_serving = bool(self.queue)
            while self.queue:
                await self._serve_batch()
        except BaseException as error:
            pending, self.queue, self.running = [*self.queue, *self.running.values()], [], {}
            if pending:
                self.engine.free()  # NaN in the cache must not reach other rows
            for waiting in pending:
                fail(waiting.future, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.engine.stats.seconds = time.perf_counter() - start
            with self.engine.lock:
                self._task = self._loop = self._scheduler = self._decoder = None
                self._is_serving = False

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
            steps, reported_at, self._is_closed = 0, 0, False
            while (scheduler.is_busy or scheduler.has_results) and self._is_awaited():
                with torch.inference_mode():
                    finished = scheduler.take_finished()  # of an abort
                    if scheduler.is_busy:
                        scheduler.advance()
                        finished += scheduler.take_finished()
                engine.stats.steps += scheduler.steps - steps
                steps = scheduler.steps
                if steps - reported_at >= SEARCH_INTERVAL:
                    reported_at = steps
                    self._report(scheduler)
                for row, completion in finished:
                    engine.stats.tokens += len(completion.token_ids)
                    self._resolve(self.running.pop(row.index), completion)
                if not self.running and not self.queue:
                    break  # before the coroutines resume: they may update the weights, or call generate() or sleep()
                await asyncio.sleep(0)
                self._extend(params)
        self._scheduler = self._decoder = None  # the engine frees its memory when it sleeps
        self.running.clear()  # requests that were cancelled

    def _is_awaited(self) -> bool:
        """Whether a request is not cancelled. The engine must be idle once all are: no caller waits for it, so weights
        may be pushed at any time."""
        return bool(self.queue) or any(not pending.future.done() for pending in self.running.values())

    def _report(self, scheduler: "SlotScheduler | PagedScheduler") -> None:
        """Pass new tokens to the requests that have `on_tokens`."""
        since = {i: p.reported for i, p in self.running.items() if p.request.on_tokens is not None}
        if not since:
            return
        with torch.inference_mode():
            found = scheduler.sampled(since)
        for row, token_ids, log_probs in found:
            pending = self.running[row.index]
            pending.reported += len(token_ids)
            pending.request.on_tokens(token_ids, log_probs)

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
            if pending.future.done():  # cancelled
                continue
            try:
                pending.row = Row.of(self._count, pending.request, self._decoder)
            except ValueError as error:
                fail(pending.future, error)
                continue
            self._count += 1
            self.running[pending.row.index] = pending
            rows.append(pending.row)
        return admission_order(rows)

    @staticmethod
    def _resolve(pending: _Pending, completion: Completion) -> None:
        if not pending.future.done():
            pending.future.set_result(completion)
