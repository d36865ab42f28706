"""The SGLang rollout engine, with the contract of `verl.rollout.base.RolloutEngine`."""

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.rollout.base import RolloutEngine, RolloutStats
from verl.rollout.checks import check_request
from verl.rollout.request import Completion, Request, matches_ids
from verl.rollout.sampling import SAMPLING_KEYS
from verl.rollout.sglang.filters import filter_params, processor
from verl.rollout.sglang.images import MediaReader
from verl.rollout.sglang.service import Job, Service
from verl.rollout.sglang.weights import FollowerReceiver, SglangMemory, SglangReceiver
from verl.utils.rng import fork_seed

_LENGTH = "rollout.max_model_len, by default data.max_prompt_length + data.max_response_length"


def arguments_of(job: Job, records: bool = False, media: MediaReader | None = None) -> dict[str, Any]:
    """Arguments of `Engine.async_generate` that continue the tokens of a job.

    Args:
        job: the request, and its tokens so far.
        records: report the experts that the routers choose.
        media: makes the images of prompts; None for a text model.
    """
    request, params, stops = job.request, job.request.params, list(job.request.params.active_stop_ids)
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_tokens - len(job.token_ids),
        "temperature": params.temperature,
        "stop_token_ids": stops or None,
        "ignore_eos": not stops,
        "sampling_seed": fork_seed(params.seed, request.sample_id),
    }
    arguments = {
        "input_ids": [*request.prompt_ids, *job.token_ids],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": params.stop is not None,
    }
    if request.has_images:
        given = media.read(request.prompt_ids, request.multi_modal_inputs, len(job.token_ids), request.continued)
        arguments["image_data"] = [given]
    if records:
        arguments["return_routed_experts"] = True
    if params.filters:
        sampling["custom_params"] = filter_params(params)
        arguments["custom_logit_processor"] = processor()
    return arguments


def decode_experts(text: str, layers: list[int], shape: tuple[int, int]) -> np.ndarray:
    """The experts of a response, (tokens, layers, k), as SGLang reports them: base64 of int32, for all layers.

    Args:
        text: base64.
        layers: the layers with experts.
        shape: (all layers, k).
    """
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, *shape)[:, layers]


class SglangRollout(RolloutEngine):
    """Generates with SGLang (Zheng et al. 2023, arXiv 2312.07104), on rank 0 of a tensor-parallel group.

    Log-probs are those of the distribution that was sampled from, in float32; of the unscaled distribution when greedy.

    With SGLang's `enable_deterministic_inference`, random numbers of a response depend only on its seed and sample id.
    Without it, SGLang has one random stream for all requests, so a run is not reproducible.

    Args:
        service: runs the requests.
        memory: GPU memory of the engine.
        receiver: its receiver of weights.
        vocab_size: number of tokens of the model.
        max_length: longest sequence, prompt plus response.
        media: makes the images of prompts; None for a text model.
    """

    sampling_keys = SAMPLING_KEYS
    supports_tensor_parallel = True

    def __init__(
        self,
        service: Service,
        memory: SglangMemory,
        receiver: SglangReceiver,
        vocab_size: int,
        max_length: int,
        media: MediaReader | None = None,
    ):
        self.service = service
        self.memory = memory
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.media = media
        self.stats = RolloutStats()
        self._receiver = receiver
        self.records_routing = service.experts is not None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutEngine.generate`. May run at the same time as requests of `generate_one`.

        Raises:
            ValueError: an invalid request (see `check_request`), non-finite logits, or weights that were not received.
        """
        for index, request in enumerate(requests):
            self._check(f"prompt {index}", request)
        start = time.perf_counter()
        self._prepare()
        futures = [self.service.submit(request) for request in requests]
        try:
            completions = [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        tokens = sum(len(completion.token_ids) for completion in completions)
        self.stats = RolloutStats(tokens, seconds=time.perf_counter() - start)
        return completions

    async def generate_one(self, request: Request) -> Completion:
        """See `RolloutEngine.generate_one`. Continuous batching; event loops of several threads share the batch."""
        self._check(f"the prompt of sample_id {request.sample_id!r}", request)
        self._prepare()
        return await asyncio.wrap_future(self.service.submit(request))

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`."""
        self.service.abort(lambda request: matches_ids(request, request_ids))

    def follow(self) -> None:
        """See `RolloutEngine.follow`."""

    def _check(self, name: str, request: Request) -> None:
        images = self.media is not None
        check_request(name, request, "sglang", self.vocab_size, self.max_length, _LENGTH, images)
        if self.media is not None:
            self.media.check(name, request)

    def _prepare(self) -> None:
        self._receiver.check_filled()
        self.memory.allocate("kv_cache")

    # ---- memory and weights -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the KV cache. Does nothing on a CPU.

        Raises:
            ValueError: requests are running.
        """
        with self.service.exclusive("sleep()", idle=True):
            self.memory.free("kv_cache")

    def wake(self) -> None:
        """Does nothing: the KV cache is allocated when it is used."""

    def receiver(self) -> SglangReceiver:
        return self._receiver


class SglangFollower(RolloutEngine):
    """The other ranks of a tensor-parallel group: SGLang's processes on their devices belong to rank 0."""

    supports_tensor_parallel = True
    records_routing = True  # rank 0 reports them

    def __init__(self, receiver: FollowerReceiver | None = None) -> None:
        self._receiver = receiver or FollowerReceiver()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Not supported on this rank. Raises ValueError."""
        raise ValueError("rollout.name=sglang: rank 0 of a tensor-parallel group generates; call follow() on others")

    def follow(self) -> None:
        """See `RolloutEngine.follow`."""

    def receiver(self) -> FollowerReceiver:
        return self._receiver
