"""HuggingFace modules for the rollout engines in process that do not share the trainer's: empty, or from files."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from verl.config import schema
from verl.registry import did_you_mean


def has_adapters(model: schema.ModelConfig) -> bool:
    """Whether LoRA adapters lie beside the weights of the trained model."""
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def empty_module(
    model: schema.ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    buffers: Iterable[tuple[str, torch.Tensor]],
    attention: str | None = None,
) -> nn.Module:
    """The model with uninitialized parameters, which a weight sync fills.

    Args:
        model: the `model` section.
        dtype: of the parameters.
        device: where the module is.
        buffers: the values of its buffers, by name.
        attention: transformers' name of the attention implementation; None is the default.
    """
    from transformers import AutoModelForCausalLM

    config = _read_config(model)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, **_build(model, attention))
    module = module.to_empty(device=device).requires_grad_(False)
    module.tie_weights()  # each got separate memory
    for name, buffer in buffers:
        module.get_buffer(name).copy_(buffer)
    return module.eval()


def load_module(
    model: schema.ModelConfig, dtype: torch.dtype, device: torch.device, attention: str | None = None
) -> nn.Module:
    """The model with the weights of its files, adapters merged. Raises ValueError where some weights are missing."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    config, verbosity = _read_config(model), logging.get_verbosity()
    logging.set_verbosity_error()  # its table of missing keys is replaced by the error below
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            model.path, config=config, dtype=dtype, output_loading_info=True, **_build(model, attention)
        )
    finally:
        logging.set_verbosity(verbosity)
    if report["missing_keys"] or report["mismatched_keys"]:
        raise ValueError(
            f"{model.path!r} lacks weights of {type(module).__name__}, which would stay random: missing "
            f"{sorted(report['missing_keys'])[:5]}, of other shape {list(report['mismatched_keys'])[:5]}"
        )
    module = module.to(device)
    if model.lora_adapter_path is not None:
        module = _merge_adapters(module, model.lora_adapter_path)
    return module.requires_grad_(False).eval()


def _read_config(model: schema.ModelConfig) -> Any:
    """The model's HuggingFace config with `override_config`. Raises ValueError where there is none."""
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except OSError as error:
        raise ValueError(f"no HuggingFace model at {model.path!r}: {error}") from error
    known = config.to_dict()
    for name, value in model.override_config.items():
        if name not in known:
            raise ValueError(f"override_config: the model's configuration has no {name!r}: {did_you_mean(name, known)}")
        setattr(config, name, value)
    return config


def _build(model: schema.ModelConfig, attention: str | None) -> dict[str, Any]:
    return {"trust_remote_code": model.trust_remote_code} | (
        {} if attention is None else {"attn_implementation": attention}
    )


def _merge_adapters(module: nn.Module, path: str) -> nn.Module:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("model.lora_adapter_path needs peft: pip install peft") from error
    return PeftModel.from_pretrained(module, path).merge_and_unload()
