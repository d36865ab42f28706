"""How the parts of a decoder layer between its matrix products are computed.

"plain": as transformers writes them, one kernel per operation. "fused": by our own functions (`fused_layers`).
"liger": by the Liger kernels. "compiled": every decoder layer by torch.compile. "invariant": every token alike in every
batch, matrix products and attention included (`invariant`).
"""

import logging
from typing import Literal

import torch
from torch import nn

from verl.modeling.linear import Phase

logger = logging.getLogger("verl.engines")

Kernels = Literal["plain", "fused", "liger", "compiled", "invariant"]

#: model types with the norm, MLP and rotary embedding of Llama
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")


def use_kernels(module: nn.Module, kernels: Kernels, phase: Phase) -> None:
    """Let a model compute its layers so. A model that "fused" does not know stays plain, and the log says so.

    phase: tells "fused" when the weights do not change. Raises ValueError where Liger is asked for and not installed,
    or does not know the model.
    """
    if kernels == "fused":
        if module.config.model_type not in LLAMA_LIKE:
            logger.info("%s: its layers run as transformers writes them, no fused kernels", module.config.model_type)
            return
        from verl.modeling.fused_layers import fuse

        fuse(module, phase)
    elif kernels == "liger":
        _use_liger(module)
    elif kernels == "invariant":
        from verl.modeling.batch_invariant.model import use_invariant  # builds on this file

        use_invariant(module)
    elif kernels == "compiled":
        layer_classes = set(module._no_split_modules or ())
        for layer in module.modules():
            if type(layer).__name__ in layer_classes:
                layer.compile(dynamic=True)


def compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """What the product of x and weight is read as by the matrix product that follows."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.result_type(x, weight)


def _use_liger(module: nn.Module) -> None:
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ModuleNotFoundError as error:
        raise ValueError("model.use_liger needs the package liger-kernel: install it or use false") from error
    if module.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"model.use_liger: Liger does not know the model type {module.config.model_type!r}: use false")
    _apply_liger_kernel_to_instance(module)
