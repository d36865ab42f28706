"""The loop that steps vLLM's engine: one batch for `generate` and for concurrent calls of `generate_one`.

A task of the engine's thread adds requests, steps and aborts; it ends when no request is left. Calls that change the
weights or the memory of the engine run between two steps (`Stepper.exclusive`).

With tensor parallelism every rank has an engine, and all must take the same steps with the same requests. Rank 0 of a
group decides; before each step it sends new and aborted requests to the others, which run `Stepper.follow`.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from verl.rollout.base import fail
from verl.rollout.engine_copy import EngineJob, EngineRequests, running_error
from verl.rollout.request import SEARCH_INTERVAL, Completion, FinishReason, Request
from verl.rollout.routed_experts import cut


@dataclass(eq=False)
class Job(EngineJob):
    """A request to vLLM."""

    # its tokens are read after every step. Otherwise all at once when it is finished, which is faster, but it cannot be
    # aborted with its tokens so far.
    streams: bool
    future: "Future[Completion]" = field(default_factory=Future)
    key: str = ""
    searched: int = 0  # tokens that were searched for stop strings
    reported: int = 0  # tokens passed to request.on_tokens

    def report(self) -> None:
        """Pass new tokens to `request.on_tokens`, with stop strings only those that were searched."""
        until = len(self.token_ids) if self.request.params.stop is None else self.searched
        if self.request.on_tokens is not None and until > self.reported:
            self.request.on_tokens(self.token_ids[self.reported : until], self.log_probs[self.reported : until])
            self.reported = until

    def finish(self, reason: FinishReason) -> None:
        """Deliver the completion, or an error if a log-prob is not finite."""
        if not self.future.done():
            try:
                self.future.set_result(self.completion(reason))
            except ValueError as error:
                self.future.set_exception(error)


class Channel(Protocol):
    """Sends the decisions of rank 0 to the other ranks of a tensor-parallel group."""

    def send(self, message: Any) -> None:
        """Send a message. Called on rank 0."""

    def receive(self) -> Any:
        """Receive a message. Called on the other ranks."""


class Stepper(EngineRequests):
    """Steps one engine. `exclusive` yields the running jobs; those of `generate` cannot be interrupted.

    Args:
        engine: vLLM's `LLMEngine`.
        sampling: (request, streams) -> vLLM's `SamplingParams`.
        prepare: called before requests are added, on the thread of the loop.
        version: the current weight version.
        channel: to the other ranks of the tensor-parallel group; None without them.
        recorded_layers: the layers with experts, if completions have `routed_experts`.
    """

    def __init__(
        self,
        engine: Any,
        sampling: Callable[[Request, bool], Any],
        prepare: Callable[[], None],
        version: Callable[[], int],
        channel: Channel | None = None,
        recorded_layers: list[int] | None = None,
    ):
        super().__init__("vllm")
        self._engine = engine
        self._sampling = sampling
        self._prepare = prepare
        self._version = version
        self._channel = channel
        self._recorded_layers = recorded_layers
        weakref.finalize(self, self.thread.stop)
        # of the thread:
        self._new: list[Job] = []
        self._running: dict[str, Job] = {}
        self._stopped: list[str] = []  # ended by a stop string, but still in the engine
        self._task: asyncio.Task | None = None  # steps until no request is left
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._count = 0
        #: steps since the engine was made
        self.steps = 0

    # ---- from any thread ----------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        """Add requests; all of one call are admitted in the same step."""
        self.thread.call(self._add, jobs)

    def is_busy(self) -> bool:
        """Whether requests are waiting or running."""
        return self._task is not None

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _add(self, jobs: Sequence[Job]) -> None:
        self._new += jobs
        if self._task is None and jobs:
            self._task = self.thread.loop.create_task(self._serve())

    def _abort(self, matches: Callable[[Request], bool]) -> None:
        for job in [*self._new, *self._running.values()]:
            job.is_aborted |= matches(job.request)

    async def _end(self) -> None:
        """Abort all requests, and wait until the engine has none."""
        self._abort(lambda request: True)  # after an error; otherwise none is left
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _close(self, caller: str, idle: bool) -> list[Job]:
        running = list(self._running.values())
        if (idle and (running or self._new)) or not all(job.streams for job in running):
            raise running_error(caller)
        self._may_step.clear()
        return running

    async def _reopen(self) -> None:
        self._may_step.set()

    async def _serve(self) -> None:
        """Step until no request is left. Submissions, aborts and exclusive calls run between two steps."""
        try:
            while True:
                await asyncio.sleep(0)
                await self._may_step.wait()
                if not self._iterate():
                    return
        except BaseException as error:
            failed, self._new, self._running = [*self._new, *self._running.values()], [], {}
            removed, self._stopped = [*self._stopped, *(job.key for job in failed if job.key)], []
            for job in failed:
                fail(job.future, error)
            self._forget(removed)
        finally:
            self._task = None

    def _iterate(self) -> bool:
        """Admit, abort and step once. Returns False when no request is left."""
        jobs = [*self._running.values(), *self._new]
        ended = [job for job in jobs if job.is_aborted or job.future.cancelled()]
        new, self._new = [job for job in self._new if job not in ended], []
        for job in new:
            self._count += 1
            job.key = str(self._count)
            job.versions.append((0, self._version()))
            self._running[job.key] = job
        for job in ended:
            self._running.pop(job.key, None)
        removed, self._stopped = [*self._stopped, *(job.key for job in ended if job.key)], []
        is_stepping = bool(self._running or removed)
        if is_stepping:
            for job in ended:
                self._record(job)
            if new:
                self._prepare()
            self._read(self._step(new, removed))
        for job in ended:
            job.finish("abort")
        return is_stepping

    def _step(self, new: list[Job], removed: list[str]) -> list[Any]:
        # stop strings are searched for on rank 0 only
        requests = []
        for job in new:
            request = replace(job.request, params=replace(job.request.params, stop=None), on_tokens=None)
            requests.append((job.key, request, job.streams))
        if self._channel is not None:
            self._channel.send((requests, removed))
        return self._take(requests, removed)

    def _take(self, new: list[tuple[str, Request, bool]], removed: list[str]) -> list[Any]:
        """The step that all ranks take."""
        self._forget(removed)
        for key, request, streams in new:
            self._engine.add_request(key, prompt_of(request), self._sampling(request, streams))
        self.steps += 1
        return self._engine.step() if self._engine.has_unfinished_requests() else []

    def _forget(self, keys: list[str]) -> None:
        if keys:
            self._engine.abort_request(keys)

    def _read(self, outputs: list[Any]) -> None:
        """Append new tokens to their jobs, and finish those that have ended."""
        for output in outputs:
            job = self._running.get(output.request_id)
            if job is None:
                continue
            (chunk,) = output.outputs
            if job.request.has_images and not job.token_ids:
                check_expanded(job.request, output.prompt_token_ids)
            job.token_ids += chunk.token_ids
            job.log_probs += log_probs_of(chunk.token_ids, chunk.logprobs)
            stop = job.request.params.stop
            end = None
            if stop is not None and (output.finished or len(job.token_ids) - job.searched >= SEARCH_INTERVAL):
                end = stop.find(job.token_ids, job.searched)
                job.searched = len(job.token_ids)
            if end is not None:
                del job.token_ids[end:], job.log_probs[end:]
                if not output.finished:
                    self._stopped.append(job.key)
            if end is None and not output.finished:
                job.report()
            else:
                self._record(job, chunk if output.finished else None)
                del self._running[job.key]
                job.finish("stop" if end is not None or chunk.finish_reason == "stop" else "length")

    def _record(self, job: Job, output: Any = None) -> None:
        """Set the experts that were chosen for the tokens of a job that has ended. output: with the choices; None: vLLM
        has not finished the request, but has collected some."""
        if self._recorded_layers is None or not job.token_ids:
            return
        outputs = self._engine.output_processor
        keys = outputs.external_req_ids.get(job.key, ()) if output is None else ()
        chunks = [chunk for key in keys for chunk in outputs.request_states[key].routed_experts_chunks]
        rows = np.concatenate(chunks) if chunks else getattr(output, "routed_experts", None)
        tokens = len(job.request.prompt_ids) + len(job.token_ids) - 1
        job.routed_experts = cut(() if rows is None else rows, tokens)[:, self._recorded_layers]

    # ---- tensor parallelism -------------------------------------------------------------------------------------

    @contextmanager
    def leading(self) -> Iterator[None]:
        """On rank 0 of a tensor-parallel group; its end ends `follow` on the other ranks."""
        try:
            yield
        finally:
            self.thread.run_until_complete(self._end())
            if self._channel is not None:
                self._channel.send(None)

    def follow(self) -> None:
        """On the other ranks: take the steps of rank 0."""
        self._prepare()
        while (message := self._channel.receive()) is not None:
            self._take(*message)


def prompt_of(request: Request) -> dict[str, Any]:
    """A request's prompt as vLLM takes it; it expands the placeholders of images itself."""
    if not request.has_images:
        return {"prompt_token_ids": list(request.prompt_ids)}
    media = request.multi_modal_data
    data = {kind[:-1]: list(media[kind]) for kind in ("images", "videos") if media.get(kind)}
    return {"prompt_token_ids": list(request.raw_prompt_ids), "multi_modal_data": data}


def check_expanded(request: Request, prompt: Sequence[int]) -> None:
    """Raise ValueError if vLLM has expanded the placeholders of a prompt to other tokens than the processor."""
    if list(prompt) != list(request.prompt_ids):
        raise ValueError(
            f"sample id {request.sample_id}: rollout.name=vllm computed a prompt of {len(prompt)} tokens, expected the "
            f"{len(request.prompt_ids)} of data preparation: pass the arguments of the processor to vLLM too "
            "(rollout.engine_kwargs.vllm.mm_processor_kwargs)"
        )


def log_probs_of(token_ids: Sequence[int], log_probs: Any) -> list[float]:
    """The log-prob of each sampled token, from flat or per-token log-probs of vLLM."""
    if isinstance(log_probs, list):
        return [position[token].logprob for token, position in zip(token_ids, log_probs, strict=True)]
    return list(log_probs.logprobs[:: max(len(log_probs.logprobs) // max(len(token_ids), 1), 1)])
