"""What the adapter needs of the installed SGLang, and the arguments of its engine."""

import asyncio
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from verl.rollout.base import RolloutEnv
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.external import (
    FREE_SHARE,
    cache_bytes_per_token,
    check_engine_kwargs,
    granted_memory,
    import_checked,
    parameters_of,
    shared_args,
)
from verl.rollout.request import SEARCH_INTERVAL
from verl.rollout.routed_experts import check_records
from verl.rollout.sglang.traits import TRAITS
from verl.utils.rng import fork_seed

# ---- the installed SGLang -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capabilities:
    """Optional features of the installed SGLang, found from signatures and attributes."""

    # a weight push is enclosed in `begin_weight_update` and `end_weight_update`. Running requests can then be
    # interrupted for it, and report which weights sampled which tokens.
    update_sessions: bool
    routed_experts: bool = False  # the experts that the routers choose can be reported
    # of `ServerArgs`, to which `sglang.Engine` passes its own; empty: not known
    arguments: frozenset[str] = frozenset()


def probe(on_gpu: bool) -> Capabilities:
    """Import SGLang. on_gpu: whether the engine runs on a GPU. Raises ImportError if it is not installed or too old."""
    if not on_gpu:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read at import
    policy = asyncio.get_event_loop_policy()
    try:
        engine = import_checked(TRAITS, "sglang.srt.entrypoints.engine").Engine
        arguments = parameters_of(import_checked(TRAITS, "sglang.srt.server_args").ServerArgs)
    finally:
        asyncio.set_event_loop_policy(policy)  # SGLang's import replaces it
    return Capabilities(
        update_sessions="begin_weight_update" in dir(engine),
        routed_experts="return_routed_experts" in parameters_of(engine.async_generate),
        arguments=arguments,
    )


# ---- arguments, from the `rollout` section --------------------------------------------------------------------------

#: arguments that the adapter sets -> the key that sets them
_OWNED = {
    "model_path": "actor_rollout_ref.model.path",
    "json_model_override_args": "actor_rollout_ref.model.override_config",
    "tp_size": "rollout.tensor_model_parallel_size",
    "mem_fraction_static": "rollout.gpu_memory_utilization",
    "max_running_requests": "rollout.max_num_seqs",
    "context_length": "rollout.max_model_len",
    "disable_radix_cache": "rollout.enable_prefix_caching",
    "chunked_prefill_size": "rollout.enable_chunked_prefill and rollout.max_num_batched_tokens",
    "disable_cuda_graph": "rollout.enforce_eager",
    "enable_memory_saver": "rollout.free_cache_engine",
    "random_seed": "rollout.seed",
}
_NOT_SUPPORTED = {
    "server_args": "its fields are those of engine_kwargs.sglang",
    "device": "the engine runs on the device of its rank",
    "base_gpu_id": "the engine runs on the device of its rank",
    "custom_weight_loader": "a push is verified in the scheduler",
    "enable_custom_logit_processor": "it applies top-k, top-p and min-p",
    "stream_interval": "the adapter searches for stop strings in streamed responses",
    "incremental_streaming_output": "the adapter searches for stop strings in streamed responses",
    "stream_output": "the adapter searches for stop strings in streamed responses",
    "custom_sigquit_handler": "an error of a process of SGLang is raised in the trainer",
    "weight_version": "it is the number of completed training steps",
    "enable_weights_cpu_backup": "the trainer pushes the weights again before they are used",
    "moe_runner_backend": "weights of experts are loaded in the layout of SGLang's Triton kernels",
    "pp_size": "use rollout.tensor_model_parallel_size",
    "dp_size": "every group of rollout ranks has its own engine",
    "nnodes": "a tensor-parallel group is on one node",
    "speculative_algorithm": "its draft model would not be trained",
}
#: arguments that take precedence over `disable_cuda_graph`, or compile
_NOT_EAGER = ("cuda_graph_config", "cuda_graph_backend_decode", "cuda_graph_backend_prefill", "enable_torch_compile")
_ORIGINAL_LOG_PROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
_SLACK = 8  # positions that SGLang keeps free
_SEEDS = 2**31  # of random_seed


def check_kwargs(kwargs: dict[str, Any], known: Collection[str] = ()) -> None:
    """Raise ValueError for arguments in `engine_kwargs.sglang` that contradict this adapter or another key, or that are
    not among the known ones, and for an environment variable that changes the log-probs."""
    check_engine_kwargs("sglang", kwargs, _OWNED, _NOT_SUPPORTED, known)
    if os.environ.get(_ORIGINAL_LOG_PROBS, "0").lower() in ("1", "true"):
        raise ValueError(
            f"rollout.name=sglang: {_ORIGINAL_LOG_PROBS} is set: log-probs would be those before the temperature, but "
            "training needs those of the distribution that was sampled from: unset it"
        )


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for a dtype that SGLang does not support: its CUDA kernels are compiled for 16 bits only."""
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        names = {torch.float32: "fp32", torch.float64: "fp64"}
        raise ValueError(
            f"rollout.name=sglang on {device}: expected weights in bf16 or fp16, found {names.get(dtype, dtype)}: "
            "SGLang's CUDA kernels support no others; set rollout.dtype=bf16"
        )


def engine_args(copy: EngineCopy, env: RolloutEnv, capabilities: Capabilities) -> dict[str, Any]:
    """Arguments of `sglang.Engine`.

    Raises:
        ValueError: an argument in `engine_kwargs.sglang` that is not supported, a quantized model, a dtype that SGLang
            does not support on this device, or choices of experts that this SGLang does not report.
    """
    config, on_gpu = copy.config, env.device.type == "cuda"
    kwargs = dict(config.engine_kwargs.sglang)
    check_kwargs(kwargs, capabilities.arguments)
    check_dtype(copy.dtype, env.device)
    for name in _NOT_EAGER if config.enforce_eager else ():
        if kwargs.get(name) not in (None, False, "disabled"):
            raise ValueError(
                f"rollout.engine_kwargs.sglang.{name} contradicts rollout.enforce_eager=true, which disables CUDA "
                "graphs and torch.compile: remove one of them"
            )
    args = shared_args(copy) | {
        "model_path": copy.model.path,
        "tp_size": env.tp_size,
        "context_length": _context_length(copy),
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_cuda_graph": config.enforce_eager or not on_gpu,
        "enable_memory_saver": config.free_cache_engine and on_gpu,
        "random_seed": fork_seed(copy.seed, "sglang", env.rank // env.tp_size) % _SEEDS,
        "enable_custom_logit_processor": True,
        "stream_interval": SEARCH_INTERVAL,
        "custom_weight_loader": ["verl.rollout.sglang.loader.load"],
        "log_level": "error",
    }
    if copy.model.override_config:
        args["json_model_override_args"] = json.dumps(dict(copy.model.override_config))
    args |= _expert_args(copy, on_gpu, capabilities)
    if on_gpu:
        args["base_gpu_id"] = env.device.index or 0
        args["mem_fraction_static"] = memory_share(config.gpu_memory_utilization, env.device)
    else:
        args |= {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": _host_cache_tokens(copy)}
        args["mem_fraction_static"] = FREE_SHARE  # SGLang would keep 12 GiB free; the cache has `max_total_tokens`
    return args | kwargs


def _expert_args(copy: EngineCopy, on_gpu: bool, capabilities: Capabilities) -> dict[str, Any]:
    """Arguments for a mixture of experts. ValueError: its choices are not reported, or a tied output layer."""
    args: dict[str, Any] = {}
    config, text = copy.config, copy.hf_config.get_text_config()
    if copy.has_experts and text.tie_word_embeddings:
        raise ValueError(
            f"rollout.name=sglang: {text.model_type} with tie_word_embeddings=true: SGLang's mixtures of experts have "
            "a separate output layer, which would have no weights: use rollout.name=native or vllm"
        )
    if copy.records:
        check_records(config, "sglang", capabilities.routed_experts)
        args["enable_return_routed_experts"] = True
        if not config.enable_chunked_prefill:
            # SGLang records at most `chunked_prefill_size` tokens of a batch: instead of -1, a size that is not reached
            args["max_prefill_tokens"] = config.max_num_batched_tokens
            args["chunked_prefill_size"] = config.max_num_batched_tokens + _context_length(copy)
    if on_gpu and copy.has_experts:
        args["moe_runner_backend"] = "triton"  # the default depends on the GPU; others permute the weights
    return args


def _context_length(copy: EngineCopy) -> int:
    """SGLang keeps a few positions of its context free. It rejects a context above the positions of the model; those
    beyond `max_length` are not used, since longer requests are rejected."""
    length = copy.max_length
    positions = copy.hf_config.get_text_config().to_dict().get("max_position_embeddings")
    if positions is not None and length <= positions < length + _SLACK:
        os.environ.setdefault(_LONGER_CONTEXT, "1")
    return length + _SLACK


def memory_share(asked: float, device: torch.device) -> float:
    """SGLang's `mem_fraction_static`, a fraction of the memory that is free when the engine starts."""
    granted, free, _ = granted_memory("SGLang", asked, device)
    return round(granted / free, 3)


def _host_cache_tokens(copy: EngineCopy) -> int:
    """Tokens of the KV cache on a CPU: those of all concurrent sequences, up to a quarter of the free memory."""
    row = copy.max_length + _SLACK
    possible = psutil.virtual_memory().available // 4 // cache_bytes_per_token(copy.hf_config, copy.dtype)
    return min((copy.config.max_num_seqs + 1) * row, max(possible, 2 * row))
