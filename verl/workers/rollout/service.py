"""Generation in the background: the engine of a rollout worker generates while the worker serves short calls.

    service = GenerationService(engine, complete, run, device)
    service.resume()                          # a new service is paused
    service.submit("uid", prompts)            # returns at once: the trajectories of one group
    groups = service.collect(timeout=0.02)    # the groups that have ended, possibly none
    service.pause(partial=True)               # the engine is idle from here on: new weights can be loaded
    service.resume()                          # the interrupted responses continue, with the new weights

Every trajectory is a task of one event loop, which runs in a thread. A request that a pause interrupts is continued by
another request, whose prompt is the prompt and all tokens so far: the engine recomputes their KV cache with the new
weights. This works with every engine that supports `abort`; others finish the requests that they have started.

Rank 0 of a tensor-parallel group leads from `resume` to `pause` (`RolloutEngine.leading`). The other ranks have a
`FollowingService`, whose thread runs `RolloutEngine.follow` meanwhile. During a pause no rank leads or follows, so all
of them can load weights, and generate in the foreground.
"""

import asyncio
import atexit
import concurrent.futures
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from verl.agents.loop import GenerateFn, Prompt, Trajectory
from verl.rollout.base import RolloutEngine
from verl.rollout.engine_thread import EngineThread
from verl.rollout.request import Completion, Request
from verl.rollout.routed_experts import extended
from verl.utils.coroutines import GENERATION_CLOCK, PausableClock, gather_coroutines
from verl.utils.rng import fork_seed

log = logging.getLogger(__name__)

#: runs the trajectory of one prompt with the given function as its engine
RunTrajectory = Callable[[Prompt, GenerateFn], Awaitable[Trajectory]]

_JOIN_SECONDS = 3.0  # for `follow` to return when the process ends
_REPORT_SECONDS = 60.0  # a pause in which nothing has ended for so long is reported
_NAMED = 5  # requests in a message


class _Service:
    """A thread whose failure is raised by every call."""

    _thread: EngineThread
    _is_raised = False  # whether a call has raised the error

    def _raise_error(self) -> None:
        if self._thread.error is not None:
            self._is_raised = True
            raise self._thread.error


class GenerationService(_Service):
    """Runs trajectories in an event loop in a separate thread. Paused until the first `resume`.

    Args:
        engine: has the weight version, aborts requests, and leads the other ranks of its tensor-parallel group.
        complete: the engine's response to one request (`RolloutEngine.generate_one`).
        run: runs one trajectory.
        pause_limit: seconds that `pause` may take.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        complete: GenerateFn,
        run: RunTrajectory,
        device: torch.device,
        pause_limit: float = math.inf,
    ):
        self._engine = engine
        self._complete = complete
        self._run_trajectory = run
        self._pause_limit = pause_limit
        # of the event loop: changed in its thread only
        self._trajectories_may_start = asyncio.Event()
        self._requests_may_start = asyncio.Event()
        self._started = 0  # trajectories that have started and not ended
        self._in_engine: list[Request] = []
        self._ended = asyncio.Event()  # set after every end of a trajectory or a request
        self._clock = PausableClock()
        self._leading: AbstractContextManager[None] | None = None  # entered from `resume` to `pause`
        # shared with the thread of the calls
        self._finished: list[tuple[str, list[Trajectory]]] = []
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = EngineThread("rollout service", device, self._notify)
        atexit.register(self.close)

    # ---- calls --------------------------------------------------------------------------------------------------

    def submit(self, uid: str, prompts: Sequence[Prompt]) -> None:
        """Start the trajectories of one group. Raises the error of an earlier one."""
        self._raise_error()
        self._thread.submit(self._run_group(uid, list(prompts)))

    def collect(self, timeout: float) -> list[tuple[str, list[Trajectory]]]:
        """Return the groups that have ended since the last call, each with its uid, in the order in which they ended.

        Args:
            timeout: seconds to wait for the first one.

        Raises:
            Exception: the error of a trajectory, unchanged.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._thread.error is not None, timeout)
            self._raise_error()
            finished, self._finished = self._finished, []
        return finished

    def pause(self, partial: bool) -> None:
        """Return once no request is in the engine, and start none until `resume`.

        Args:
            partial: abort the running requests, to be continued after `resume`. Otherwise wait for the end of all
                trajectories that have started.

        Raises:
            TimeoutError: it takes longer than the limit; the message says what it waits for.
        """
        self._call(self._pause, partial)

    def resume(self) -> None:
        """Start the requests that wait, among them the continuations of those that `pause` has aborted."""
        self._call(self._resume)

    def close(self) -> None:
        """Drop all trajectories and end the thread. Raises an error that no other call has raised, such as that of the
        end of leading."""
        atexit.unregister(self.close)
        self._is_closing = True
        self._thread.close()
        self._stop_leading()
        if not self._is_raised:
            self._raise_error()

    def _call(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run a coroutine function in the event loop and wait for it."""
        self._raise_error()
        try:
            self._thread.run_until_complete(function(*args), self._pause_limit)
        finally:
            self._raise_error()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- in the thread ------------------------------------------------------------------------------------------

    async def _run_group(self, uid: str, prompts: list[Prompt]) -> None:
        try:
            trajectories = await gather_coroutines([self._run(prompt) for prompt in prompts])
        except Exception as error:
            self._thread.fail(error)
            return
        except asyncio.CancelledError as error:  # of an agent loop, or of the thread
            if self._is_closing or self._thread.error is not None:
                raise
            wrapped = RuntimeError(f"a trajectory of the group {uid} was cancelled by its agent loop or engine")
            wrapped.__cause__ = error
            self._thread.fail(wrapped)
            return
        with self._changed:
            self._finished.append((uid, trajectories))
            self._changed.notify_all()

    async def _run(self, prompt: Prompt) -> Trajectory:
        await self._trajectories_may_start.wait()
        self._started += 1
        GENERATION_CLOCK.set(self._clock)
        try:
            return await self._run_trajectory(prompt, self._generate)
        finally:
            self._started -= 1
            self._ended.set()

    async def _pause(self, partial: bool) -> None:
        self._trajectories_may_start.clear()
        if partial:
            self._requests_may_start.clear()
            self._clock.pause()  # without partial rollouts, the trajectories and their time limits continue
            self._engine.abort()
        # a trajectory may end before a request that it has cancelled or does not wait for
        latest = time.monotonic() + self._pause_limit
        while self._in_engine or (self._started and not partial):
            self._ended.clear()
            left = latest - time.monotonic()
            try:
                await asyncio.wait_for(self._ended.wait(), max(0.0, min(left, _REPORT_SECONDS)))
            except TimeoutError:
                if left <= _REPORT_SECONDS:
                    raise TimeoutError(self._pause_message(partial)) from None
                log.warning("%s", self._pause_message(partial))
        self._requests_may_start.clear()
        self._stop_leading()

    def _pause_message(self, partial: bool) -> str:
        """Which requests and trajectories a pause waits for."""
        ids = [str(request.sample_id) for request in self._in_engine]
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        requests = f"{len(ids)} requests in the engine (sample ids {', '.join(ids[:_NAMED])}{more})"
        trajectories = "" if partial else f", {self._started} trajectories that have started"
        reason = "they were aborted" if partial else "trainer.async.partial_rollout=false waits for whole trajectories"
        return (
            f"rollout service: expected a pause to end within {self._pause_limit:g} s, still waits for "
            f"{requests if ids else 'no request in the engine'}{trajectories} ({reason})"
        )

    def _stop_leading(self) -> None:
        """End `follow` on the other ranks. No request is in the engine. After a failure they may not answer."""
        if self._leading is not None and self._thread.error is None:
            leading, self._leading = self._leading, None
            leading.__exit__(None, None, None)

    async def _resume(self) -> None:
        if self._leading is None:
            leading = self._engine.leading()
            leading.__enter__()
            self._leading = leading
        self._clock.resume()
        self._requests_may_start.set()
        self._trajectories_may_start.set()

    # ---- one request --------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Completion:
        """The response to a request, in one or more completions of the engine, with a span for each version."""
        whole = Completion([], [], "abort")
        while True:
            await self._requests_may_start.wait()
            version = self._engine.weight_version
            self._in_engine.append(request)
            try:
                completion = await self._complete(continuation(request, whole))
            finally:
                self._in_engine = [other for other in self._in_engine if other is not request]
                self._ended.set()
            extend(whole, completion, version, request)
            # the engine may abort a request itself: only those of a pause are continued
            if whole.finish_reason != "abort" or self._requests_may_start.is_set():
                return whole


class FollowingService(_Service):
    """The service of the other ranks of a tensor-parallel group, with the calls of `GenerationService`. A thread
    follows rank 0, which has the prompts and the trajectories, from `resume` to `pause`."""

    def __init__(self, engine: RolloutEngine, device: torch.device, pause_limit: float = math.inf):
        self._engine = engine
        self._pause_limit = pause_limit
        self._following: concurrent.futures.Future[None] | None = None
        self._thread = EngineThread("rollout service", device)
        atexit.register(self.close)

    def submit(self, uid: str, prompts: Sequence[Prompt]) -> None:
        """Does nothing: rank 0 generates. Raises the error of an earlier call of `follow`."""
        self._raise_error()

    def collect(self, timeout: float) -> list[tuple[str, list[Trajectory]]]:
        """Returns nothing, at once. Raises the error of `follow`."""
        self._raise_error()
        return []

    def pause(self, partial: bool) -> None:
        """Return when rank 0 has paused. Raises TimeoutError at the limit, which says where the thread is."""
        latest = time.monotonic() + self._pause_limit
        while self._following is not None:
            left = latest - time.monotonic()
            if concurrent.futures.wait([self._following], max(0.0, min(left, _REPORT_SECONDS))).done:
                self._following = None
                break
            message = (
                f"rollout service: expected rank 0 of the tensor-parallel group to end a pause within "
                f"{self._pause_limit:g} s, this rank still follows it: {self._thread.position()}"
            )
            if left <= _REPORT_SECONDS:
                raise TimeoutError(message)
            log.warning("%s", message)
        self._raise_error()

    def resume(self) -> None:
        """Follow rank 0 until it pauses."""
        self._raise_error()
        if self._following is None:
            self._following = self._thread.submit(self._follow())

    def close(self) -> None:
        """Wait until rank 0 has closed its service, or has failed. Raises an error that no other call has raised."""
        atexit.unregister(self.close)
        if self._following is not None and concurrent.futures.wait([self._following], _JOIN_SECONDS).not_done:
            log.warning("rollout service: rank 0 has not ended generation: %s", self._thread.position())
            self._thread.stop()  # it ends once rank 0 has
        else:
            self._thread.close()
        if not self._is_raised:
            self._raise_error()

    async def _follow(self) -> None:
        try:
            self._engine.follow()
        except BaseException as error:  # raised by the next call
            self._thread.fail(error)


def continuation(request: Request, so_far: Completion) -> Request:
    """The request that continues an interrupted response. Its random numbers are not those of the tokens so far: they
    depend on the number of these tokens."""
    done = len(so_far.token_ids)
    if not done:
        return request
    return dataclasses.replace(
        request,
        prompt_ids=[*request.prompt_ids, *so_far.token_ids],
        params=dataclasses.replace(request.params, max_tokens=request.params.max_tokens - done),
        sample_id=fork_seed(request.sample_id, "continued", done),
    )


def extend(whole: Completion, completion: Completion, version: int, request: Request) -> None:
    """Append the next completion of an interrupted response.

    Args:
        whole: the response so far; changed in place.
        version: the version of the engine's weights, for an engine that reports no spans.
        request: that of the whole response.
    """
    start = len(whole.token_ids)
    spans = completion.weight_versions or ([(0, version)] if completion.token_ids else [])
    for first, span_version in spans:
        if not whole.weight_versions or whole.weight_versions[-1][1] != span_version:
            whole.weight_versions.append((start + first, span_version))
    whole.routed_experts = extended(whole.routed_experts, completion.routed_experts, len(request.prompt_ids) + start)
    whole.token_ids += completion.token_ids
    whole.log_probs += completion.log_probs
    whole.finish_reason = completion.finish_reason
    stop = request.params.stop
    if stop is not None and start and (end := stop.find(whole.token_ids, start)) is not None:
        # a stop string may begin before the interruption, where the engine does not look for it
        del whole.token_ids[end:], whole.log_probs[end:]
        whole.weight_versions = [span for span in whole.weight_versions if span[0] < end]
        whole.finish_reason = "stop"
    elif whole.finish_reason == "abort" and len(whole.token_ids) == request.params.max_tokens:
        whole.finish_reason = "length"
