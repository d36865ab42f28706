"""HuggingFace modules for in-process rollout engines that do not share the trainer's: uninitialized, or from files."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from verl.config import schema
from verl.modeling.attention import use_vision_attention
from verl.modeling.fp8 import use_fp8
from verl.modeling.huggingface import load_pretrained, read_config
from verl.modeling.vision import is_vision_config
from verl.rollout.base import RolloutEnv
from verl.utils.device import resolve_dtype


def engine_dtype(config: schema.RolloutEngineConfig, env: RolloutEnv) -> torch.dtype:
    """The dtype of an engine's weights: `rollout.dtype`, by default that of the training computation."""
    if config.dtype == "auto" and env.compute_dtype is not None:
        return env.compute_dtype
    return resolve_dtype(config.dtype, env.device)


def auto_class(config: Any) -> Any:
    """The Auto class of transformers for a model that generates, with images if it reads them."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_images = is_vision_config(config) and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if has_images else AutoModelForCausalLM


def empty_module(
    model: schema.ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    buffers: Iterable[tuple[str, torch.Tensor]],
    attention: str | None = None,
    cut: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """The model with uninitialized parameters, to be filled by a weight sync.

    Args:
        buffers: values of its buffers, by name.
        attention: attention implementation of transformers; None for the default.
        cut: replaces the parameters of the module, which is on "meta", by slices.
    """
    config = read_config(model.path, model.override_config, model.trust_remote_code)
    with torch.device("meta"):
        module = auto_class(config).from_config(config, dtype=dtype, **_loading_options(model, attention))
    if cut is not None:
        cut(module)
    module = module.to_empty(device=device).requires_grad_(False)
    module.tie_weights()  # each got separate memory
    for name, buffer in buffers:
        module.get_buffer(name).copy_(buffer)
    return use_fp8(use_vision_attention(module), model.quantization).eval()


def load_module(
    model: schema.ModelConfig, dtype: torch.dtype, device: torch.device, attention: str | None = None
) -> nn.Module:
    """The model with weights from its files and adapters merged. Raises ValueError if weights are missing."""
    config = read_config(model.path, model.override_config, model.trust_remote_code)
    module, _ = load_pretrained(auto_class(config), model.path, config, dtype, **_loading_options(model, attention))
    module = module.to(device)
    if model.lora_adapter_path is not None:
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ImportError("model.lora_adapter_path needs peft: pip install peft") from error
        module = PeftModel.from_pretrained(module, model.lora_adapter_path).merge_and_unload()
    return use_fp8(use_vision_attention(module), model.quantization).requires_grad_(False).eval()


def parameter_shapes(model: schema.ModelConfig) -> dict[str, torch.Size]:
    """HuggingFace name of every parameter of a model -> its shape; a tied head is not listed."""
    config = read_config(model.path, model.override_config, model.trust_remote_code)
    with torch.device("meta"):
        module = auto_class(config).from_config(config, trust_remote_code=model.trust_remote_code)
    module.tie_weights()
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def _loading_options(model: schema.ModelConfig, attention: str | None) -> dict[str, Any]:
    """Arguments of transformers' `from_config` and `from_pretrained`. attention: None for the default."""
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    return options if attention is None else options | {"attn_implementation": attention}
