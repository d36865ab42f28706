"""What the adapter needs of the installed vLLM, the arguments of its engine, and the process group that it joins."""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import psutil
import torch
import torch.distributed as dist

from verl.rollout.base import RolloutEnv
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.external import (
    LORA,
    cache_bytes_per_token,
    check_engine_kwargs,
    installed_version,
    parameters_of,
    probe_package,
    shared_args,
)
from verl.rollout.routed_experts import check_records
from verl.rollout.vllm.traits import PACKAGE, TRAITS
from verl.utils.rendezvous import join_default_group

# ---- the installed vLLM ---------------------------------------------------------------------------------------------

# Found from signatures and attributes instead of version numbers.

#: class -> attributes that the adapter calls
_ATTRIBUTES = {
    "vllm:LLM": ("collective_rpc", "sleep", "wake_up", "reset_prefix_cache"),
    "vllm.v1.engine.llm_engine:LLMEngine": ("add_request", "step", "abort_request", "has_unfinished_requests"),
}
#: class or method -> parameters that the adapter passes
_PARAMETERS = {
    "vllm:SamplingParams": ("logprobs", "seed", "stop_token_ids", "ignore_eos", "detokenize", "output_kind", "min_p"),
    "vllm.engine.arg_utils:EngineArgs": (
        *("load_format", "logprobs_mode", "distributed_executor_backend", "skip_tokenizer_init", "enable_sleep_mode"),
        *("gpu_memory_utilization", "enable_prefix_caching", "enable_chunked_prefill", "generation_config"),
    ),
    "vllm:LLM.reset_prefix_cache": ("reset_running_requests",),
    "vllm:LLM.sleep": ("level",),
    "vllm:LLM.wake_up": ("tags",),
}


@dataclass(frozen=True)
class Capabilities:
    """Optional features of the installed vLLM.

    Attributes:
        version: for messages.
        flat_logprobs: log-probs of a response come as flat lists, without an object per token.
        async_scheduling: the next step can be scheduled while the last one runs; it can be turned off.
        fused_all_reduce: a compiler pass replaces all-reduce and norm by a kernel of FlashInfer; it can be turned off.
        device_normalize: pixels can be normalized by the model instead of the processor; it can be turned off.
        reset_encoder_cache: features of images can be dropped when the weights change.
        routed_experts: the experts that the routers choose can be reported, on a GPU.
        adapters: LoRA adapters can be loaded from tensors.
        arguments: of `EngineArgs`, to which `vllm.LLM` passes its own; empty: not known.
    """

    version: str
    flat_logprobs: bool
    async_scheduling: bool
    fused_all_reduce: bool
    device_normalize: bool = False
    reset_encoder_cache: bool = False
    routed_experts: bool = False
    adapters: bool = False
    arguments: frozenset[str] = frozenset()


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


def probe() -> Capabilities:
    """Import vLLM and check that it has what the adapter needs.

    Raises:
        ImportError: vLLM is not installed or does not import.
        ValueError: it lacks something; the message lists what, with the tested versions.
    """
    set_environment()
    classes = probe_package(TRAITS, _ATTRIBUTES, _PARAMETERS)
    from vllm.config import PassConfig

    arguments = parameters_of(classes["EngineArgs"])
    return Capabilities(
        installed_version(PACKAGE),
        flat_logprobs="flat_logprobs" in parameters_of(classes["SamplingParams"]),
        async_scheduling="async_scheduling" in arguments,
        fused_all_reduce="fuse_allreduce_rms" in parameters_of(PassConfig),
        device_normalize="mm_device_do_normalize" in arguments,
        reset_encoder_cache="reset_encoder_cache" in dir(classes["LLMEngine"]),
        routed_experts="enable_return_routed_experts" in arguments,
        adapters="lora_target_modules" in arguments and _loads_adapters(),
        arguments=arguments,
    )


def _loads_adapters() -> bool:
    """Whether vLLM has the LoRA manager that `adapters` calls."""
    try:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights
        from vllm.lora.model_manager import LoRAModelManager
    except ImportError:  # another version has them elsewhere
        return False
    methods = {"add_adapter", "activate_adapter", "remove_adapter"} <= {*dir(LoRAModelManager)}
    matrices = {"module_name", "rank", "lora_alpha", "lora_a", "lora_b"} <= parameters_of(LoRALayerWeights)
    return methods and matrices and {"lora_model_id", "rank", "loras"} <= parameters_of(LoRAModel)


log = logging.getLogger(__name__)

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
    "max_loras": LORA,
    "max_cpu_loras": LORA,
    "speculative_config": "its draft model would not be trained",
}
_PAGE = 128  # tokens; vLLM's block size on a CPU
_FREE_SHARE = 0.9  # of the free GPU memory, for the engine


def check_kwargs(kwargs: dict[str, Any], known: Collection[str] = ()) -> None:
    """Raise ValueError for arguments in `engine_kwargs.vllm` that contradict this adapter or another key, or that are
    not among the known ones."""
    check_engine_kwargs("vllm", kwargs, _OWNED, _NOT_SUPPORTED, known)


def engine_args(copy: EngineCopy, env: RolloutEnv, capabilities: Capabilities) -> dict[str, Any]:
    """Arguments of `vllm.LLM`.

    Args:
        copy: the model, and where its weights come from.
        env: where the engine runs.
        capabilities: of the installed vLLM.

    Raises:
        ValueError: an argument in `engine_kwargs.vllm` that is not supported, a quantized model, or choices of experts
            that this vLLM does not report.
    """
    config, on_gpu, length = copy.config, env.device.type == "cuda", copy.max_length
    kwargs = dict(config.engine_kwargs.vllm)
    check_kwargs(kwargs, capabilities.arguments)
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
        args |= _vision_args(capabilities)
    if copy.records:
        check_records(config, f"vllm {capabilities.version} on {env.device}", on_gpu and capabilities.routed_experts)
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
        args |= _tensor_parallel_args(capabilities, kwargs)
    return args | kwargs


def _vision_args(capabilities: Capabilities) -> dict[str, Any]:
    """Arguments for a vision-language model. ValueError: features of old weights would be kept, or no torchvision."""
    if not capabilities.reset_encoder_cache:
        raise ValueError(
            f"rollout.name=vllm: vLLM {capabilities.version} lacks LLMEngine.reset_encoder_cache, so images would keep "
            "the features of old weights: install a newer vLLM, or use rollout.name=native"
        )
    if find_spec("torchvision") is None:
        raise ValueError(
            "rollout.name=vllm: vLLM reads images with torchvision, which is not installed: pip install torchvision (a "
            "build for the installed torch), or use rollout.name=native"
        )
    # the processor of images needs the tokenizer. Constants of a normalization in the model would be random: they are
    # neither in the files nor pushed
    normalize = {"mm_device_do_normalize": False} if capabilities.device_normalize else {}
    return {"skip_tokenizer_init": False} | normalize


def _tensor_parallel_args(capabilities: Capabilities, kwargs: dict[str, Any]) -> dict[str, Any]:
    """kwargs: `engine_kwargs.vllm`."""
    args: dict[str, Any] = {"disable_custom_all_reduce": True}  # it shares memory, which sleep mode frees
    if capabilities.async_scheduling:
        args["async_scheduling"] = False  # its order of steps depends on time; all ranks must take the same steps
    if capabilities.fused_all_reduce:
        # off unless it is set: vLLM 0.24 has it on for Hopper and Blackwell, see `capabilities.set_environment`
        value = kwargs.pop("compilation_config", None)
        config = {"mode": value} if isinstance(value, int) else dict(value or {})
        passes = {"fuse_allreduce_rms": False} | dict(config.get("pass_config") or {})
        args["compilation_config"] = config | {"pass_config": passes}
    return args


def memory_share(asked: float, device: torch.device) -> float:
    """Fraction of the GPU memory for the engine: at most what other users of the GPU, such as the trainer, leave."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    possible = int(100 * _FREE_SHARE * free / total) / 100
    if asked <= possible:
        return asked
    log.warning(
        "rollout.gpu_memory_utilization=%.2f: only %.1f of %.1f GiB are free on %s, so vLLM gets %.2f of the memory",
        *(asked, free / 2**30, total / 2**30, device, possible),
    )
    return possible


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
