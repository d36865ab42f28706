"""SGLang's engine and its requests, which run in one thread, so that threads and event loops can share it."""

import asyncio
import logging
import multiprocessing
import os
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from verl.rollout.engine_copy import EngineJob, EngineRequests, running_error
from verl.rollout.request import Completion, FinishReason, Request
from verl.rollout.routed_experts import extended
from verl.rollout.sglang.settings import Capabilities

log = logging.getLogger(__name__)

_ABORT_AGAIN = 0.05  # seconds until an abort is sent again
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"


class ProcessFailed(RuntimeError):
    """A process of SGLang has failed."""

    def __init__(self) -> None:
        super().__init__("a process of SGLang has failed: its error is in the log")


class FailureHandler:
    """Handler of SIGQUIT, which SGLang's processes send to this one when they fail."""

    def __init__(self) -> None:
        # whose requests fail then; None while the engine starts, which is interrupted by `ProcessFailed`
        self.service: Service | None = None

    def __call__(self, signum: int, frame: Any) -> None:
        if self.service is None:
            raise ProcessFailed
        self.service.thread.fail(ProcessFailed())


def start_engine(args: dict[str, Any], on_failure: FailureHandler) -> Any:
    """Make an `sglang.Engine`. The variables and the start method of processes that it sets are restored.

    Raises:
        ProcessFailed: a process of SGLang ended.
        ValueError: an argument that SGLang does not know.
    """
    from sglang.srt.entrypoints.engine import Engine

    method, variables = multiprocessing.get_start_method(allow_none=True), dict(os.environ)
    if args.get("device") == "cpu" and args["tp_size"] > 1:
        os.environ.setdefault(_CORES, shares_of_cores(args["tp_size"]))  # the default is a NUMA node for each rank
    try:
        return Engine(**args, custom_sigquit_handler=on_failure)
    except TypeError as error:
        raise ValueError(f"rollout.engine_kwargs.sglang: {error}") from error
    finally:
        multiprocessing.set_start_method(method, force=True)
        for name in os.environ.keys() | variables.keys():
            if name.startswith("SGLANG_") and name != _CORES:
                continue
            if name in variables:
                os.environ[name] = variables[name]
            else:
                del os.environ[name]


def shares_of_cores(ranks: int) -> str:
    """The cores of this process in equal shares for the ranks, such as "0,1|2,3". With fewer cores, ranks share one."""
    cores = sorted(os.sched_getaffinity(0))
    starts = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return "|".join(",".join(map(str, cores[a : max(b, a + 1)])) for a, b in pairwise(starts))


@dataclass(eq=False)
class Job(EngineJob):
    """A request to SGLang. Its versions are those that SGLang reports."""

    rid: str = ""  # its id in SGLang; "" before it is submitted


class Service(EngineRequests):
    """Runs requests and exclusive calls on one `sglang.Engine`.

    In `exclusive`, running requests wait if SGLang can interrupt them; otherwise the context begins when they are
    finished.

    Args:
        arguments: (job) -> arguments of `Engine.async_generate` that continue its tokens.
        experts: decodes the experts that SGLang reports, if completions have `routed_experts`.
    """

    def __init__(
        self,
        engine: Any,
        capabilities: Capabilities,
        arguments: Callable[[Job], dict[str, Any]],
        experts: Callable[[str], np.ndarray] | None = None,
    ):
        super().__init__("sglang")
        self.engine = engine
        self.capabilities = capabilities
        self.experts = experts
        self._arguments = arguments
        # of the thread:
        self._jobs: set[Job] = set()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._in_engine = 0
        self._is_paused = False
        #: version that SGLang reports for its weights; None: those of the files
        self.version: str | None = None
        engine.loop = self.thread  # its blocking methods call run_until_complete

    # ---- from any thread ----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> "Future[Completion]":
        """Start a request. Cancelling the future aborts it. If SGLang fails, its result is ProcessFailed."""
        job = Job(request)
        self.thread.call(self._jobs.add, job)  # before the request starts: a later `abort` finds it
        return self.thread.submit(self._complete(job))

    # ---- in the thread ------------------------------------------------------------------------------------------

    async def _close(self, caller: str, idle: bool) -> None:
        if idle and self._in_engine:
            raise running_error(caller)
        self._is_open.clear()
        if self._in_engine and self.capabilities.update_sessions:
            from sglang.srt.managers.io_struct import PauseGenerationReqInput

            # running requests lose their KV cache, which is computed again with the new weights
            await self.engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            self._is_paused = True
        else:
            await self._is_idle.wait()

    async def _reopen(self) -> None:
        if self._is_paused:
            from sglang.srt.managers.io_struct import ContinueGenerationReqInput

            await self.engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput())
            self._is_paused = False
        self._is_open.set()

    def _abort(self, matches: Callable[[Request], bool]) -> None:
        for job in self._jobs:
            if not job.is_aborted and matches(job.request):
                job.is_aborted = True
                self._send_abort(job)

    def _send_abort(self, job: Job) -> None:
        """Abort a request until it ends: SGLang ignores ids that it does not know yet."""
        if job.rid and job in self._jobs:
            self.engine.tokenizer_manager.abort_request(rid=job.rid)
            self.thread.loop.call_later(_ABORT_AGAIN, self._send_abort, job)

    async def _complete(self, job: Job) -> Completion:
        try:
            while True:
                await self._is_open.wait()
                if job.is_aborted:
                    return job.completion("abort")
                reason = await self._continue(job)
                if reason is not None:
                    return job.completion(reason)
        finally:
            self._jobs.discard(job)

    async def _continue(self, job: Job) -> FinishReason | None:
        """Generate tokens until SGLang ends the request. Returns None if the response has not ended."""
        job.rid, before, searched = uuid.uuid4().hex, len(job.token_ids), len(job.token_ids)
        self._in_engine += 1
        self._is_idle.clear()
        end, output = None, None
        try:
            async for output in self._outputs(self._arguments(job) | {"rid": job.rid}):
                self._read(job, output, before)
                stop = job.request.params.stop
                if stop is not None and end is None:
                    end = stop.find(job.token_ids, searched)
                    searched = len(job.token_ids)
                    if end is not None and output["meta_info"]["finish_reason"] is None:
                        self.engine.tokenizer_manager.abort_request(rid=job.rid)
        except asyncio.CancelledError:
            self.engine.tokenizer_manager.abort_request(rid=job.rid)
            raise
        finally:
            job.rid = ""
            self._in_engine -= 1
            if not self._in_engine:
                self._is_idle.set()
        if end is not None:
            del job.token_ids[end:], job.log_probs[end:]
            return "stop"
        return self._reason(job, output["meta_info"]["finish_reason"])

    async def _outputs(self, arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        result = await self.engine.async_generate(**arguments)
        if not arguments["stream"]:
            yield result
            return
        async for output in result:
            yield output

    def _read(self, job: Job, output: dict[str, Any], before: int) -> None:
        """Take the tokens after the first `before` from an output, which has all tokens of its request."""
        meta = output["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        job.token_ids[before:] = [token for _, token, _ in pairs]
        job.log_probs[before:] = [log_prob for log_prob, _, _ in pairs]
        if self.experts is not None and meta.get("routed_experts"):
            choices, length = self.experts(meta["routed_experts"]), len(job.request.prompt_ids) + before
            job.routed_experts = extended(job.routed_experts, choices, length)
        if self.version is None:
            return
        if pairs and meta["weight_version"] != self.version:
            raise ValueError(
                f"rollout.name=sglang: a response was sampled with weights of version {meta['weight_version']}, "
                f"expected version {self.version}: the engine's weights are stale"
            )
        spans = [(before + span["start"], int(span["version"])) for span in meta.get("weight_versions") or ()]
        job.versions = [span for span in job.versions if span[0] < before] + spans

    def _reason(self, job: Job, reason: dict[str, Any]) -> FinishReason | None:
        """The finish reason of SGLang as a `FinishReason`."""
        params, length = job.request.params, len(job.token_ids)
        match reason["type"]:
            case "abort" if job.is_aborted:
                return "abort"
            case "stop" if job.token_ids[-1] in params.active_stop_ids:
                return "stop"
            case "stop" | "length" if length == params.max_tokens:
                return "length"
            case "stop":
                return None  # an end token of the model that the request does not stop at: it is continued
        raise ValueError(
            f"sample id {job.request.sample_id}: SGLang ended the request after {length} of {params.max_tokens} "
            f"tokens: {reason}"
        )
