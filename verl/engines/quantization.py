"""Base weights in 4 bits under LoRA adapters: QLoRA (Dettmers et al. 2023, arXiv 2305.14314), with bitsandbytes.

A weight is stored as NF4 codes with one float32 scale for 64 elements: 4.5 bits. A layer computes with the weight that
the codes stand for, rounded to the dtype of the computation, and so do the reference policy, the rollout and a merged
model.
"""

import importlib.util
import logging
from collections.abc import Iterable

import torch
from torch import nn

from verl.config import schema
from verl.modeling.huggingface import read_config
from verl.modeling.model_types import LLAMA_LIKE, MIXTURES, VISION_LIKE

#: file beside saved adapters with the names of the weights that have 4 bits
QUANTIZED = "quantized.json"
_BLOCK = 64
#: bytes of an element: a code of half a byte, and its share of a float32 scale
BYTES = 0.5 + 4 / _BLOCK
logger = logging.getLogger("verl.engines")


def check_quantization(model: schema.ModelConfig, ranks: int) -> None:
    """Raise ValueError if quantized weights are not supported.

    Args:
        model: a `model` section.
        ranks: processes of the model.
    """
    if model.quantization is None:
        return
    if model.quantization == "fp8":
        config = read_config(model.path, model.override_config, model.trust_remote_code).get_text_config()
        if config.model_type not in (supported := (*LLAMA_LIKE, *MIXTURES, *VISION_LIKE)):
            names = ", ".join(supported)
            raise ValueError(f"model.quantization=fp8: {config.model_type} is not supported, only {names}: use null")
        return
    if not model.has_adapters:
        raise ValueError(
            f"model.quantization={model.quantization}: 4-bit weights are not trained: set model.lora_rank, or "
            "model.quantization=null"
        )
    if ranks > 1:
        raise ValueError(
            f"model.quantization={model.quantization}: 4-bit weights are not sharded, and the model has {ranks} "
            "processes: use one (trainer.n_gpus_per_node=1), or model.quantization=null"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("model.quantization: bitsandbytes is not installed: pip install bitsandbytes")


def quantize(module: nn.Module, names: Iterable[str], device: torch.device, compute_dtype: torch.dtype) -> None:
    """Store the weights of linear layers in 4 bits, in place. Others keep their dtype: embeddings, experts, the head.

    Args:
        module: with adapters.
        names: the layers, as they were called without adapters.
        device: where the codes are.
    """
    import bitsandbytes as bnb

    layers, total, coded = dict(module.named_modules()), sum(p.numel() for p in module.parameters()), 0
    for name in names:
        path = f"{name}.base_layer" if f"{name}.base_layer" in layers else name
        layer = layers.pop(path)
        if not isinstance(layer, nn.Linear) or layer.in_features % _BLOCK:  # bitsandbytes decodes such rows wrongly
            continue
        coded += layer.weight.numel()
        new = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, compute_dtype, False, "nf4", device="meta"
        )
        weight = bnb.nn.Params4bit(layer.weight.data, quant_type="nf4", compress_statistics=False, module=new)
        new.weight, new.bias = weight.to(device), layer.bias
        new.support_avx512bf16_for_cpu = False  # it would change the layout of the codes
        module.set_submodule(path, new)
    logger.info("quantization=nf4: %s of %s parameters have 4 bits, the others %s", coded, total, module.dtype)


def dequantized(parameter: torch.Tensor) -> torch.Tensor:
    """The weight (out, in) that a parameter stands for, without gradient."""
    if not is_quantized(parameter):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether the elements of a parameter are codes of `quantize`."""
    return getattr(parameter, "quant_state", None) is not None


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight's codes, in its dtype."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight, blocksize=_BLOCK, quant_type="nf4"))
