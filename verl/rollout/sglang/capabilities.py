"""What the adapter needs of the installed SGLang, found from signatures and attributes instead of version numbers."""

import asyncio
import os
from dataclasses import dataclass

from verl.rollout.external import installed_version, parameters_of, probe_package
from verl.rollout.sglang.traits import PACKAGE, TRAITS

#: class -> attributes that the adapter uses
_ATTRIBUTES = {
    "sglang.srt.entrypoints.engine:Engine": (
        *("async_generate", "shutdown", "release_memory_occupation", "resume_memory_occupation"),
    ),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager": ("abort_request", "update_weights_from_tensor"),
    "sglang.srt.sampling.custom_logit_processor:CustomLogitProcessor": ("to_str",),
    "sglang.srt.utils:MultiprocessingSerializer": ("serialize",),
}
#: class -> parameters that the adapter passes
_PARAMETERS = {
    "sglang.srt.server_args:ServerArgs": (
        *("skip_tokenizer_init", "custom_weight_loader", "enable_custom_logit_processor", "stream_interval"),
        *("enable_memory_saver", "mem_fraction_static", "max_running_requests", "context_length", "load_format"),
        *("disable_radix_cache", "chunked_prefill_size", "base_gpu_id", "tp_size", "random_seed", "max_total_tokens"),
        *("custom_sigquit_handler", "json_model_override_args", "enable_deterministic_inference"),
        "enable_weights_cpu_backup",
    ),
    "sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqInput": (
        *("serialized_named_tensors", "load_format", "flush_cache", "weight_version"),
    ),
    "sglang.srt.sampling.sampling_params:SamplingParams": ("sampling_seed", "stop_token_ids", "ignore_eos"),
}


@dataclass(frozen=True)
class Capabilities:
    """Optional features of the installed SGLang.

    Attributes:
        version: for messages.
        update_sessions: a weight push is enclosed in `begin_weight_update` and `end_weight_update`. Running requests
            can then be interrupted for it, and report which weights sampled which tokens.
        routed_experts: the experts that the routers choose can be reported.
        arguments: of `ServerArgs`, to which `sglang.Engine` passes its own; empty: not known.
    """

    version: str
    update_sessions: bool
    routed_experts: bool = False
    arguments: frozenset[str] = frozenset()


def probe(on_gpu: bool) -> Capabilities:
    """Import SGLang and check that it has what the adapter needs.

    Args:
        on_gpu: whether the engine runs on a GPU.

    Raises:
        ImportError: SGLang is not installed or does not import.
        ValueError: it lacks something; the message lists what, with the tested versions.
    """
    if not on_gpu:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read at import
    policy = asyncio.get_event_loop_policy()
    try:
        classes = probe_package(TRAITS, _ATTRIBUTES, _PARAMETERS)
    finally:
        asyncio.set_event_loop_policy(policy)  # SGLang's import replaces it
    return Capabilities(
        installed_version(PACKAGE),
        update_sessions="begin_weight_update" in dir(classes["Engine"]),
        routed_experts="return_routed_experts" in parameters_of(classes["Engine"].async_generate),
        arguments=parameters_of(classes["ServerArgs"]),
    )
