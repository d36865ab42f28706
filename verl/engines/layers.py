"""How the parts of a decoder layer between its matrix products are computed.

"plain": as transformers writes them, one kernel per operation. "fused": by our kernels (`layer_kernels`), on a GPU.
"liger": by the Liger kernels. "compiled": every decoder layer by torch.compile.
"""

import logging
import sys
from functools import partial, wraps
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

logger = logging.getLogger("verl.engines")

Kernels = Literal["plain", "fused", "liger", "compiled"]

#: model types with the norm, MLP and rotary embedding of Llama -> what the names of their classes begin with
LLAMA_LIKE = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def use_kernels(module: nn.Module, kernels: Kernels) -> None:
    """Let a model on a GPU compute its layers so. A model that "fused" does not know stays plain, and the log says so.

    Raises ValueError where Liger is asked for and not installed, or does not know the model.
    """
    if kernels == "fused":
        _fuse(module)
    elif kernels == "liger":
        _use_liger(module)
    elif kernels == "compiled":
        layer_classes = set(module._no_split_modules or ())
        for layer in module.modules():
            if type(layer).__name__ in layer_classes:
                layer.compile(dynamic=True)


def compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """What the product of x and weight is read as by the matrix product that follows."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.result_type(x, weight)


def _fuse(module: nn.Module) -> None:
    name = LLAMA_LIKE.get(module.config.model_type)
    if name is None:
        logger.info("%s: its layers run as transformers writes them, no fused kernels", module.config.model_type)
        return
    silu = module.config.hidden_act in ("silu", "swish")
    for child in module.modules():
        if type(child).__name__ == f"{name}RMSNorm":
            child.forward = partial(_norm, child)
        elif type(child).__name__ == f"{name}MLP" and silu:
            child.forward = partial(_mlp, child)
        elif type(child).__name__ == f"{name}Attention":
            _fuse_rotary(sys.modules[type(child).__module__])


def _norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, DTensor):  # a norm of heads that tensor parallelism spreads
        return type(module).forward(module, x)
    from verl.engines.layer_kernels import RMSNorm

    return RMSNorm.apply(x, module.weight, module.variance_epsilon, compute_dtype(x, module.weight))


def _mlp(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from verl.engines.layer_kernels import SwiGLU

    gate, up = module.gate_proj(x), module.up_proj(x)
    if isinstance(gate, DTensor):  # of an MLP that tensor parallelism spreads
        return module.down_proj(module.act_fn(gate) * up)
    return module.down_proj(SwiGLU.apply(gate, up))


def _fuse_rotary(modeling) -> None:
    """The function that all attention layers of a modeling file call, replaced once for all of them."""
    original = modeling.apply_rotary_pos_emb
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def apply(q, k, cos, sin, unsqueeze_dim=1):
        if not q.is_cuda or q.shape[0] != 1 or unsqueeze_dim != 1 or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, unsqueeze_dim)
        from verl.engines.layer_kernels import Rotary

        dtype = compute_dtype(q, cos)
        return Rotary.apply(q, cos, sin, dtype), Rotary.apply(k, cos, sin, dtype)

    modeling.apply_rotary_pos_emb = apply


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
