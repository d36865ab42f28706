"""Continuous batching: the requests of `generate` and of concurrent `generate_one` run in the same loop.

The loop is a generator that yields between two steps. `generate` submits all its requests and runs it to the end. For
`generate_one`, a task runs it and returns to the event loop at every yield, so that new requests are admitted to the
running batch and a finished response resumes its coroutine immediately.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from verl.modeling.attention import use_default_attention
from verl.modeling.huggingface import LMHead, trunk_of
from verl.modeling.vision import attention_of
from verl.rollout.base import RolloutStats, fail
from verl.rollout.native.scheduler import Row, SlotScheduler, admission_order
from verl.rollout.request import (
    SEARCH_INTERVAL,
    Completion,
    PromptLogProbs,
    Request,
    SamplingParams,
    batches_of,
    matches_ids,
)

if TYPE_CHECKING:
    from verl.rollout.native.engine import NativeRollout
    from verl.rollout.native.paged_scheduler import PagedScheduler

#: logits of a prompt that are computed at once
_CHUNK_ELEMENTS = 2**26


@dataclass(eq=False)
class _Pending:
    """A request whose caller is waiting: for `future`, or for all requests of `generate`. row: set once the request has
    been checked."""

    request: Request
    params: SamplingParams
    future: "asyncio.Future[Completion] | None" = None
    row: Row | None = None
    completion: Completion | None = None  # of a request of `generate`
    reported: int = 0  # tokens passed to request.on_tokens
    is_aborted: bool = False

    @property
    def is_done(self) -> bool:
        """Whether it has a completion, or was cancelled."""
        return self.completion is not None if self.future is None else self.future.done()


class ContinuousBatch:
    """The requests of one engine.

    A request whose sampling parameters (temperature, top_k, top_p, min_p, stop tokens) differ from those of the running
    batch, or whose sequence does not fit its cache, waits until the batch is done. Later requests wait behind it.
    """

    def __init__(self, engine: "NativeRollout"):
        self.engine = engine
        self.queue: deque[_Pending] = deque()  # in order of arrival
        self.running: dict[int, _Pending] = {}  # by Row.index
        self._caller = ""  # the method that runs the loop: "generate()", "generate_one()", or none
        self._count = 0
        self._is_full = False  # whether new requests wait until the running batch is done
        self._has_aborted = False  # whether a request was aborted or cancelled since the last step
        self._scheduler: SlotScheduler | PagedScheduler | None = None
        self._task: asyncio.Task | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_busy(self) -> bool:
        """Whether requests are waiting or running."""
        self._forget_dead_task()
        return bool(self.queue or self._caller)  # in this order: the caller is set before it takes from the queue

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutEngine.generate`. Only requests that agree in all but max_tokens, seed and stop share a batch."""
        engine = self.engine
        with engine.lock:
            self._check_caller("generate()")
            if self.is_busy():
                raise ValueError("generate() was called while requests of generate_one() are running: wait for them")
            self._caller = "generate()"
        start, engine.stats = time.perf_counter(), RolloutStats()
        try:
            decoder = engine.read() if requests else None
            rows = [Row.from_request(index, request, decoder) for index, request in enumerate(requests)]
            pending = [_Pending(request, request.params, row=row) for request, row in zip(requests, rows)]
            for params, members in batches_of(requests):
                for index in members:
                    pending[index].params = params
                    self.queue.append(pending[index])
            with torch.inference_mode():
                for _ in self._steps(is_open=False):
                    pass
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            engine.stats.seconds = time.perf_counter() - start
            self._scheduler, self._caller = None, ""
        return [each.completion for each in pending]

    async def generate_one(self, request: Request) -> Completion:
        """See `RolloutEngine.generate_one`."""
        loop = asyncio.get_running_loop()
        pending = _Pending(request, request.params.shared, loop.create_future())
        with self.engine.lock:
            self._check_caller("generate_one()")
            self._forget_dead_task()
            if self._task is None:
                self._loop, self._task = loop, loop.create_task(self._serve())
            elif self._loop is not loop:
                raise ValueError(
                    "generate_one() was called in a second event loop while requests of the first are running: use one "
                    "event loop per engine, or wait for them"
                )
            self.queue.append(pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            pending.is_aborted = self._has_aborted = True
            raise

    def _check_caller(self, caller: str) -> None:
        """Raise ValueError while `generate` runs, and on a rank that does not lead."""
        tp = self.engine.tp
        if not tp.leads:
            raise ValueError(f"{caller} was called on rank {tp.rank} of a tensor-parallel group: call follow()")
        if self._caller == "generate()":
            raise ValueError(f"{caller} was called while generate() is running in another thread: wait for it")

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """Abort the requests that are waiting or running now. Thread-safe: they end before the next step."""
        for pending in [*self.queue, *self.running.values()]:
            pending.is_aborted |= matches_ids(pending.request, request_ids)
        self._has_aborted = True

    def _forget_dead_task(self) -> None:
        """Reset if the task cannot continue: its event loop was closed, or it was cancelled before its first step."""
        if self._task is None or not (self._loop.is_closed() or self._task.done()):
            return
        pending, loop = self._clear(), self._loop
        self._task.get_coro().close()  # leaves the session of the engine
        self.engine.free()
        if not loop.is_closed():
            for waiting in pending:
                loop.call_soon_threadsafe(waiting.future.cancel)
        self._task = self._loop = self._scheduler = None
        self._caller = ""

    def _clear(self) -> list[_Pending]:
        """Remove and return all requests."""
        pending, self.queue, self.running = [*self.queue, *self.running.values()], deque(), {}
        return pending

    def _fail_all(self, error: BaseException) -> None:
        """Deliver an error to every request."""
        pending = self._clear()
        if pending:
            self.engine.free()  # NaN in the cache must not reach other rows
        for future in (each.future for each in pending if each.future is not None):
            fail(future, error)

    async def _serve(self) -> None:
        """Run the loop until no request is left."""
        start, self.engine.stats = time.perf_counter(), RolloutStats()
        try:
            await asyncio.sleep(0)  # the coroutines that are ready now submit their requests first
            self._caller = "generate_one()" if self.queue else ""
            with closing(self._steps(is_open=True)) as steps:
                advance = torch.inference_mode()(lambda: next(steps, False))
                while advance():
                    await asyncio.sleep(0)
        except BaseException as error:
            self._fail_all(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.engine.stats.seconds = time.perf_counter() - start
            with self.engine.lock:
                self._task = self._loop = self._scheduler = None
                self._caller = ""

    # ---- the loop -----------------------------------------------------------------------------------------------

    def _steps(self, is_open: bool) -> Iterator[bool]:
        """Run batches until no request is left, in inference mode. Yields True between two steps. is_open: requests
        may arrive meanwhile, and each is waited for by itself."""
        while self.queue:
            if is_open:
                with torch.inference_mode(False):  # the engine may share the tensors with training
                    self.engine.read()
            with self.engine.session():
                yield from self._batch(self.queue[0].params, is_open)
            # the engine frees its memory when it sleeps
            self._scheduler = None
            self.running.clear()  # requests that were cancelled

    def _batch(self, params: SamplingParams, is_open: bool) -> Iterator[bool]:
        """Run one batch: the first request of the queue and all that can share its batch."""
        pending, stats = self._take_compatible(params), self.engine.stats
        if not pending:
            return
        scheduler = self._scheduler = self.engine.start(params, admission_order([p.row for p in pending]), is_open)
        steps, reported_at, self._is_full = 0, 0, False
        while (scheduler.is_busy or scheduler.has_results) and self._is_awaited():
            finished = self._end_aborted() if self._has_aborted else []
            if scheduler.is_busy:
                scheduler.advance()
            if is_open or not scheduler.is_busy:  # `generate` reads all at the end, since it waits for the device
                finished += scheduler.take_finished()
            stats.steps += scheduler.steps - steps
            steps = scheduler.steps
            if not scheduler.is_busy:
                drafts, accepted = scheduler.take_draft_counts()
                stats.drafts, stats.accepted = stats.drafts + drafts, stats.accepted + accepted
            if is_open and steps - reported_at >= SEARCH_INTERVAL:
                reported_at = steps
                self._report()
            for row, completion in finished:
                stats.tokens += len(completion.token_ids)
                if params.prompt_logprobs is not None:
                    count = params.prompt_logprobs
                    completion.prompt_log_probs = prompt_log_probs(self.engine.module, row.prompt, count)
                _resolve(self.running.pop(row.index), completion)
            if not self.running and not self.queue:
                break  # before the coroutines resume: they may update the weights, or call generate() or sleep()
            yield True
            if is_open:
                self._extend(params)

    def _is_awaited(self) -> bool:
        """Whether a request is not cancelled. The engine must be idle once all are: no caller waits for it, so weights
        may be pushed at any time."""
        return bool(self.queue) or any(not pending.is_done for pending in self.running.values())

    def _end_aborted(self) -> list[tuple[Row, Completion]]:
        """End the requests that were aborted or cancelled. Returns the rows that have ended."""
        self._has_aborted = False
        for pending in [pending for pending in self.queue if pending.is_aborted]:
            self.queue.remove(pending)
            _resolve(pending, Completion([], [], "abort"))
        indices = {index for index, pending in self.running.items() if pending.is_aborted}
        self._scheduler.abort(lambda row: row.index in indices)
        return self._scheduler.take_finished()

    def _report(self) -> None:
        """Pass new tokens to the requests that have `on_tokens`."""
        since = {i: p.reported for i, p in self.running.items() if p.request.on_tokens is not None}
        for row, token_ids, *values in self._scheduler.sampled(since) if since else ():
            pending = self.running[row.index]
            pending.reported += len(token_ids)
            pending.request.on_tokens(token_ids, *values)

    def _extend(self, params: SamplingParams) -> None:
        """Add new requests to the running batch, up to the first one that must wait."""
        if self._is_full or not self.queue or self.queue[0].params != params:
            return
        pending = self._take_compatible(params)
        if pending and not self.engine.extend(self._scheduler, admission_order([p.row for p in pending])):
            self._is_full = True
            self.queue.extendleft(reversed(pending))
            for each in pending:
                del self.running[each.row.index]

    def _take_compatible(self, params: SamplingParams) -> list[_Pending]:
        """Move the first requests of the queue that share `params` to `running`. An invalid request fails alone."""
        taken = []
        while self.queue and self.queue[0].params == params:
            pending = self.queue[0]
            try:
                if pending.row is None:
                    pending.row = Row.from_request(self._count, pending.request, self.engine.decoder)
                    self._count += 1
                if pending.is_aborted or pending.is_done:  # cancelled
                    _resolve(pending, Completion([], [], "abort"))
                else:
                    self.running[pending.row.index] = pending
                    taken.append(pending)
            except ValueError as error:
                fail(pending.future, error)
            self.queue.popleft()  # not before, so that an abort from another thread finds it
        return taken


def _resolve(pending: _Pending, completion: Completion) -> None:
    if pending.future is None:
        pending.completion = completion
    elif not pending.future.done():
        pending.future.set_result(completion)


@torch.no_grad()
def prompt_log_probs(module: nn.Module, prompt_ids: list[int], count: int) -> list[PromptLogProbs | None]:
    """`Completion.prompt_log_probs` of a prompt, by a forward pass: of each token, then of the `count` most probable
    ones in its place.

    Args:
        module: a causal language model, unsharded, in evaluation mode.
        prompt_ids: text tokens.
        count: K; more than the vocabulary has: all of it.
    """
    attention = attention_of(module.config)
    use_default_attention(module)
    try:
        ids = torch.tensor(prompt_ids, device=module.device)
        states, head = trunk_of(module)(input_ids=ids[None], use_cache=False)[0][0], LMHead(module)
        rows, entries = max(1, _CHUNK_ELEMENTS // module.config.get_text_config().vocab_size), [None]
        for start in range(0, len(ids) - 1, rows):
            targets = ids[start + 1 : start + 1 + rows, None]
            log_probs = head(states[start : start + len(targets)]).float().log_softmax(-1)
            values, tokens = log_probs.topk(min(count, log_probs.shape[-1]))
            target_log_probs = log_probs.gather(1, targets)
            ranks = (log_probs > target_log_probs).sum(-1, keepdim=True) + 1
            best = torch.arange(1, 1 + tokens.shape[1], device=ids.device).expand_as(tokens)
            columns = (targets, tokens), (target_log_probs, values), (ranks, best)
            entries += [list(zip(*row)) for row in zip(*(torch.cat(column, 1).tolist() for column in columns))]
        return entries
    finally:
        module.set_attn_implementation(attention)
