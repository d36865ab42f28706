"""The SGLang rollout engine, with the contract of `verl.rollout.base.RolloutEngine`."""

import base64
import functools
import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from verl.rollout.base import RolloutEngine
from verl.rollout.engine_copy import CopyRollout, EngineCopy
from verl.rollout.request import FILTERS, Completion, Request, SamplingParams
from verl.rollout.sampling import filter_logits
from verl.rollout.sglang.service import Job, Service
from verl.rollout.sglang.weights import FollowerReceiver, SglangMemory, SglangReceiver
from verl.utils.rng import fork_seed

_FILTER_KEYS = ("temperature", *FILTERS)


def arguments_of(job: Job, records: bool = False) -> dict[str, Any]:
    """Arguments of `Engine.async_generate` that continue the tokens of a job.

    Args:
        job: the request, and its tokens so far.
        records: report the experts that the routers choose.
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


class SglangRollout(CopyRollout):
    """Generates with SGLang (Zheng et al. 2023, arXiv 2312.07104), on rank 0 of a tensor-parallel group.

    Log-probs are those of the distribution that was sampled from, in float32; of the unscaled distribution when greedy.

    With SGLang's `enable_deterministic_inference`, random numbers of a response depend only on its seed and sample id.
    Without it, SGLang has one random stream for all requests, so a run is not reproducible.

    Args:
        copy: the model.
        service: runs the requests.
        memory: GPU memory of the engine.
        receiver: its receiver of weights.
    """

    def __init__(self, copy: EngineCopy, service: Service, memory: SglangMemory, receiver: SglangReceiver):
        super().__init__(copy, service, memory)
        self.service = service
        self._receiver = receiver

    def submit(self, requests: Sequence[Request], is_batch: bool) -> "list[Future[Completion]]":
        self._receiver.check_filled()
        self.memory.allocate("kv_cache")
        return [self.service.submit(request) for request in requests]

    def follow(self) -> None:
        """Does nothing: SGLang's own processes compute together."""


class SglangFollower(RolloutEngine):
    """The other ranks of a tensor-parallel group: SGLang's processes on their devices belong to rank 0."""

    supports_tensor_parallel = True
    records_routing = True  # rank 0 reports them

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Not supported on this rank. Raises ValueError."""
        raise ValueError("rollout.name=sglang: rank 0 of a tensor-parallel group generates; call follow() on others")

    def follow(self) -> None:
        """Does nothing: SGLang's own processes compute together."""

    def receiver(self) -> FollowerReceiver:
        return FollowerReceiver()


# ---- filters ---------------------------------------------------------------------------------------------------------


@functools.cache
def processor() -> str:
    """`LogitFilter` in the form in which SGLang sends it to its scheduler."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    return CustomLogitProcessor.__dict__["to_str"].__func__(LogitFilter)


def filter_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters of `LogitFilter` for one request."""
    return {"filters": json.dumps({name: getattr(params, name) for name in _FILTER_KEYS})}


class LogitFilter:
    """A logit processor of SGLang's scheduler for top-k, top-p and min-p, as `verl.rollout.sampling` applies them.

    SGLang applies its own filters to the probabilities that it samples from, but reports log-probs of the unfiltered
    distribution. A logit processor changes the logits before both, so that they agree.
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        """Filter logits (B, V), which are not divided by the temperature. One dict of `filter_params` per row."""
        rows: dict[str, list[int]] = {}
        for row, custom_params in enumerate(custom_param_list):
            rows.setdefault(custom_params["filters"], []).append(row)
        for text, indices in rows.items():
            params = SamplingParams(1, (), **json.loads(text))
            index = torch.tensor(indices, device=logits.device)
            selected = logits[index]
            logits[index] = selected.masked_fill(filter_logits(selected, params).isneginf(), float("-inf"))
        return logits
