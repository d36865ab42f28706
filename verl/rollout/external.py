"""What the adapters of vLLM and SGLang need of the installed package, and the arguments that both engines have."""

import importlib
import importlib.metadata
import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from verl.config import schema
from verl.config.errors import nearest_key
from verl.rollout.traits import EngineTraits
from verl.utils.packages import Package

if TYPE_CHECKING:
    from verl.rollout.engine_copy import EngineCopy


def installed_version(package: Package) -> str:
    """The installed version of a package, for messages."""
    for distribution in package.distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "(an unversioned copy)"


def probe_package(
    traits: EngineTraits, attributes: Mapping[str, Sequence[str]], parameters: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Import what an adapter uses of a package, and check that it has what the adapter needs.

    Args:
        traits: of the engine.
        attributes: "module:Class" -> attributes that the adapter uses.
        parameters: "module:Class" or "module:Class.method" -> parameters that the adapter passes.

    Returns:
        The classes by name.

    Raises:
        ImportError: it is not installed, or one does not import.
        ValueError: something is missing; the message lists what, with the tested versions.
    """
    if (message := traits.missing_package()) is not None:
        raise ImportError(f"rollout.name={message}")
    package = traits.package
    version = f"rollout.name={package.module}: {package.title} {installed_version(package)}"
    classes: dict[str, Any] = {}
    missing: list[str] = []
    try:
        for path in (*attributes, *parameters):
            module, _, name = path.partition(":")
            classes[name.partition(".")[0]] = _import(module, name.partition(".")[0])
    except ImportError as error:
        raise ImportError(
            f"{version} does not import: {error} (tested: {package.tested_versions}). To install: "
            f"{package.how_to_install}"
        ) from error
    for path, names in attributes.items():
        name = path.partition(":")[2]
        missing += [f"{name}.{attribute}" for attribute in names if attribute not in dir(classes[name])]
    for path, names in parameters.items():
        name, _, method = path.partition(":")[2].partition(".")
        if f"{name}.{method}" not in missing:
            known = parameters_of(inspect.getattr_static(classes[name], method) if method else classes[name])
            missing += [f"{path.partition(':')[2]}({parameter})" for parameter in names if parameter not in known]
    if missing:
        raise ValueError(
            f"{version} lacks {', '.join(missing)}; tested versions: {package.tested_versions}. To install: "
            f"{package.how_to_install}"
        )
    return classes


def parameters_of(function: Any) -> frozenset[str]:
    """Names of the parameters of a function, or of a class."""
    return frozenset(inspect.signature(function).parameters)


def _import(module: str, name: str) -> Any:
    imported = importlib.import_module(module)
    try:
        return getattr(imported, name)
    except AttributeError:
        raise ImportError(f"{module} has no {name}") from None


# ---- arguments ------------------------------------------------------------------------------------------------------


def check_not_deterministic(config: schema.RolloutEngineConfig) -> None:
    """Raise ValueError for `rollout.deterministic`."""
    if isinstance(config, schema.RolloutConfig) and config.deterministic:
        raise ValueError("rollout.deterministic needs the layers of the trainer: set rollout.name=native")


LORA = "the engine applies the adapters that are trained, and no others"
#: arguments of both engines that are not supported -> the reason
NOT_SUPPORTED = {
    "quantization": "trained weights cannot be loaded into a quantized model",
    "pipeline_parallel_size": "use rollout.tensor_model_parallel_size",
    "data_parallel_size": "every group of rollout ranks has its own engine",
    "enable_eplb": "trained weights are loaded into one copy of each expert",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "load_format": "weights come from the trainer, or from model.path without training",
}
NOT_SUPPORTED |= dict.fromkeys(("max_lora_rank", "lora_target_modules"), LORA)
#: arguments that both adapters set -> the key that sets them
OWNED = {
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "dtype": "rollout.dtype",
    "enable_return_routed_experts": "rollout.enable_rollout_routing_replay",
    "enable_lora": "rollout.lora_sync",
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
        engine: vllm or sglang.
        kwargs: the arguments.
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
