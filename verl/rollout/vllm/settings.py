"""What the adapter needs of the installed vLLM, the arguments of its engine, and the process group that it joins."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import psutil
import torch
import torch.distributed as dist

from verl.rollout.base import RolloutEnv
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.external import (
    cache_bytes_per_token,
    check_engine_kwargs,
    granted_memory,
    import_checked,
    parameters_of,
    shared_args,
)
from verl.rollout.routed_experts import check_records
from verl.rollout.vllm.traits import TRAITS
from verl.utils.rendezvous import join_default_group

# ---- the installed vLLM ---------------------------------------------------------------------------------------------


def set_environment() -> None:
    """Set the variables that vLLM reads, unless they are set: one process, only errors in the log, all-reduces by NCCL.

    vLLM's other all-reduces share GPU memory between processes by CUDA IPC or NVLink multicast, which not every host
    has, or compile their kernels when the engine starts, which takes minutes.

    Raises:
        ValueError: VLLM_ENABLE_V1_MULTIPROCESSING=1; weights are loaded in this process.
    """
    if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise ValueError("rollout.name=vllm runs in the rollout process: unset VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # threads are those of the process
    os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")


def known_arguments() -> frozenset[str]:
    """Import vLLM. Returns the arguments of its engine. Raises ImportError if it is not installed or too old."""
    set_environment()
    return parameters_of(import_checked(TRAITS, "vllm.engine.arg_utils").EngineArgs)


# ---- arguments, from the `rollout` section --------------------------------------------------------------------------

#: arguments that the adapter sets -> the reason, or the key that sets them
_OWNED = {
    "model": "actor_rollout_ref.model.path",
    "hf_overrides": "actor_rollout_ref.model.override_config",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "max_model_len": "rollout.max_model_len",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "seed": "rollout.seed",
}
_NOT_SUPPORTED = {
    "logprobs_mode": "log-probs are those of the distribution that was sampled from",
    "distributed_executor_backend": "the engine runs in the rollout processes",
    "generation_config": "sampling parameters are those of the rollout section",
    "moe_backend": "weights of experts are loaded in the layout of vLLM's Triton kernels",
    "speculative_config": "its draft model would not be trained",
}
_PAGE = 128  # tokens; vLLM's block size on a CPU


def check_kwargs(kwargs: dict[str, Any], known: Collection[str] = ()) -> None:
    """Raise ValueError for arguments in `engine_kwargs.vllm` that contradict this adapter or another key, or that are
    not among the known ones."""
    check_engine_kwargs("vllm", kwargs, _OWNED, _NOT_SUPPORTED, known)


def engine_args(copy: EngineCopy, env: RolloutEnv, known: Collection[str] = ()) -> dict[str, Any]:
    """Arguments of `vllm.LLM`. known: all arguments of the installed vLLM; empty: not known.

    Raises:
        ValueError: an argument in `engine_kwargs.vllm` that is not supported, a quantized model, or choices of experts
            that vLLM does not report on this device.
    """
    config, on_gpu, length = copy.config, env.device.type == "cuda", copy.max_length
    kwargs = dict(config.engine_kwargs.vllm)
    check_kwargs(kwargs, known)
    tokens = config.max_num_batched_tokens
    if not config.enable_chunked_prefill:
        tokens = max(tokens, length)  # a prompt must fit into one step
    args = shared_args(copy) | {
        "model": copy.model.path,
        "tensor_parallel_size": env.tp_size,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": length,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": tokens,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager or not on_gpu,
        "enable_sleep_mode": config.free_cache_engine and on_gpu,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": copy.seed,
    }
    if copy.reads_images:
        args |= _vision_args(known)
    if copy.records:
        check_records(config, f"vllm on {env.device}", on_gpu)
        args["enable_return_routed_experts"] = True
    if on_gpu and copy.has_experts:
        args["moe_backend"] = "triton"  # the default depends on the GPU; others permute the weights
    if copy.model.override_config:
        args["hf_overrides"] = dict(copy.model.override_config)
    if on_gpu:
        args["gpu_memory_utilization"] = memory_share(config.gpu_memory_utilization, env.device)
    else:
        args["kv_cache_memory_bytes"] = _host_cache_bytes(copy, env.tp_size)
    if env.tp_size > 1:
        args |= _tensor_parallel_args(kwargs)
    return args | kwargs


def _vision_args(known: Collection[str]) -> dict[str, Any]:
    """Arguments for a vision-language model. known: see `engine_args`. ValueError: no torchvision."""
    if find_spec("torchvision") is None:
        raise ValueError(
            "rollout.name=vllm: vLLM reads images with torchvision, which is not installed: pip install torchvision (a "
            "build for the installed torch), or use rollout.name=native"
        )
    # the processor of images needs the tokenizer. Constants of a normalization in the model would be random: they are
    # neither in the files nor pushed
    normalize = {"mm_device_do_normalize": False} if "mm_device_do_normalize" in known else {}
    return {"skip_tokenizer_init": False} | normalize


def _tensor_parallel_args(kwargs: dict[str, Any]) -> dict[str, Any]:
    """kwargs: `engine_kwargs.vllm`."""
    # fused all-reduces are off unless they are set: vLLM has them on for Hopper and Blackwell, see `set_environment`
    value = kwargs.pop("compilation_config", None)
    config = {"mode": value} if isinstance(value, int) else dict(value or {})
    passes = {"fuse_allreduce_rms": False} | dict(config.get("pass_config") or {})
    return {
        "disable_custom_all_reduce": True,  # it shares memory, which sleep mode frees
        "async_scheduling": False,  # its order of steps depends on time; all ranks must take the same steps
        "compilation_config": config | {"pass_config": passes},
    }


def memory_share(asked: float, device: torch.device) -> float:
    """Fraction of the GPU memory for the engine: at most what is left."""
    granted, _, total = granted_memory("vLLM", asked, device)
    return min(asked, int(100 * granted / total) / 100) if granted < asked * total else asked


def _host_cache_bytes(copy: EngineCopy, tp_size: int) -> int:
    """Bytes of the KV cache on a CPU: those of all concurrent sequences, up to a quarter of the free memory."""
    row = -(-copy.max_length // _PAGE) * _PAGE * cache_bytes_per_token(copy.hf_config, copy.dtype, tp_size)
    return min((copy.config.max_num_seqs + 1) * row, max(psutil.virtual_memory().available // 4, 2 * row))


# ---- process group --------------------------------------------------------------------------------------------------


def join_process_group(env: RolloutEnv) -> None:
    """Initialize torch.distributed unless it is initialized: vLLM forms its groups from the default group.

    Raises:
        ValueError: the process is in a group of another size.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if env.device.type == "cuda" else "gloo"
        if env.world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            join_default_group(backend)
    if dist.get_world_size() != env.world_size:
        raise ValueError(
            f"rollout.name=vllm: expected a process group of the {env.world_size} rollout ranks, found one of "
            f"{dist.get_world_size()}"
        )


@contextmanager
def launcher_variables(env: RolloutEnv) -> Iterator[None]:
    """Context with the variables that vLLM's external launcher reads: the rank, and the index of its GPU."""
    index = env.device.index if env.device.index is not None else 0
    values = {"RANK": dist.get_rank(), "LOCAL_RANK": index, "WORLD_SIZE": dist.get_world_size()}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
