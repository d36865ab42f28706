"""What the adapters of vLLM and SGLang need of the installed package, and the arguments that both engines have."""

import importlib
import inspect
import logging
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from verl.config import schema
from verl.config.errors import nearest_key
from verl.rollout.traits import EngineTraits

if TYPE_CHECKING:
    from verl.rollout.engine_copy import EngineCopy

log = logging.getLogger(__name__)


def import_checked(traits: EngineTraits, module: str) -> ModuleType:
    """Import a module of the package of an engine.

    Raises:
        ImportError: the package is not installed, is too old, or the module does not import.
    """
    if (message := traits.missing_package()) is not None:
        raise ImportError(f"rollout.name={message}")
    package = traits.package
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"rollout.name={package.module}: {package.title} {package.installed_version} does not import: {error} "
            f"(tested: {package.tested_versions}). To install: {package.how_to_install}"
        ) from error


def parameters_of(function: Any) -> frozenset[str]:
    """Names of the parameters of a function, or of a class."""
    return frozenset(inspect.signature(function).parameters)


# ---- arguments ------------------------------------------------------------------------------------------------------


def check_not_deterministic(config: schema.RolloutEngineConfig) -> None:
    """Raise ValueError for `rollout.deterministic`."""
    if isinstance(config, schema.RolloutConfig) and config.deterministic:
        raise ValueError("rollout.deterministic needs the layers of the trainer: set rollout.name=native")


FREE_SHARE = 0.9  # of the free memory, for the engine
#: arguments of the engines that are not supported -> the reason
NOT_SUPPORTED = {
    "quantization": "trained weights cannot be loaded into a quantized model",
    "pipeline_parallel_size": "use rollout.tensor_model_parallel_size",
    "data_parallel_size": "every group of rollout ranks has its own engine",
    "enable_eplb": "trained weights are loaded into one copy of each expert",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "load_format": "weights come from the trainer, or from model.path without training",
    **dict.fromkeys(
        ("enable_lora", "max_lora_rank", "lora_target_modules", "max_loras", "max_cpu_loras", "lora_paths"),
        "adapters are merged into the weights of every push",
    ),
}
#: arguments that both adapters set -> the key that sets them
OWNED = {
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "dtype": "rollout.dtype",
    "enable_return_routed_experts": "rollout.enable_rollout_routing_replay",
}


def check_engine_kwargs(
    engine: str,
    kwargs: Mapping[str, Any],
    owned: Mapping[str, str],
    not_supported: Mapping[str, str],
    known: Collection[str] = (),
) -> None:
    """Raise ValueError for arguments in `engine_kwargs.<engine>` that contradict the adapter or another key, and for
    those that the engine does not have.

    Args:
        owned: argument -> the key that sets it, in addition to `OWNED`.
        not_supported: argument -> why it cannot be set, in addition to `NOT_SUPPORTED`.
        known: all arguments of the installed version; empty: not checked.
    """
    owned, not_supported = OWNED | owned, NOT_SUPPORTED | not_supported
    for name in kwargs:
        if name in owned:
            raise ValueError(f"rollout.engine_kwargs.{engine}.{name}: set {owned[name]} instead")
        if name in not_supported:
            raise ValueError(
                f"rollout.engine_kwargs.{engine}.{name} is not supported: {not_supported[name]}; remove it"
            )
        if known and name not in known:
            near = nearest_key(name, known)
            hint = f"did you mean {near}?" if near else "remove it"
            raise ValueError(
                f"rollout.engine_kwargs.{engine}.{name}: the installed {engine} has no such argument; {hint}"
            )


def shared_args(copy: "EngineCopy") -> dict[str, Any]:
    """The arguments that both engines have. Raises ValueError for a quantized model."""
    if "quantization_config" in copy.hf_config.to_dict():
        raise ValueError(
            f"rollout.name={copy.config.name}: {copy.model.path} is quantized: {NOT_SUPPORTED['quantization']}"
        )
    return {
        "trust_remote_code": copy.model.trust_remote_code,
        "dtype": str(copy.dtype).removeprefix("torch."),
        "load_format": "auto" if copy.reads_files else "dummy",
        "skip_tokenizer_init": True,
    }


def cache_bytes_per_token(hf_config: Any, dtype: torch.dtype, tp_size: int = 1) -> int:
    """Bytes of the KV cache of one token, on one of `tp_size` ranks."""
    text = hf_config.get_text_config()
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * max(heads // tp_size, 1) * head_dim * dtype.itemsize


def granted_memory(engine: str, asked: float, device: torch.device) -> tuple[float, int, int]:
    """Bytes of a GPU for an engine, at most what other users, such as the trainer, leave; free and total bytes.

    Args:
        engine: its title, for the warning.
        asked: fraction of the total memory.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    granted = min(asked * total, FREE_SHARE * free)
    if granted < asked * total:
        log.warning(
            "rollout.gpu_memory_utilization=%.2f: only %.1f of %.1f GiB are free on %s, so %s gets %.1f GiB",
            *(asked, free / 2**30, total / 2**30, device, engine, granted / 2**30),
        )
    return granted, free, total
