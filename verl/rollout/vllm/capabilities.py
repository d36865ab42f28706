"""What the adapter needs of the installed vLLM, found from signatures and attributes instead of version numbers."""

import os
from dataclasses import dataclass

from verl.rollout.external import installed_version, parameters_of, probe_package
from verl.rollout.vllm.traits import PACKAGE, TRAITS

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
