"""Selects how the layers of a decoder are computed.

- "plain": as transformers writes them, one kernel per operation.
- "fused": by our own functions (`fused_layers`).
- "liger": by the Liger kernels.
- "compiled": every decoder layer by torch.compile.
- "batch_invariant": results for a token do not depend on the batch, GEMMs and attention included (`batch_invariant`).
"""

import logging
from typing import Literal

from torch import nn

from verl.modeling.fp8 import Fp8Linear
from verl.modeling.fused_layers import fuse
from verl.modeling.linear import WeightCache
from verl.modeling.model_types import LLAMA_LIKE, MIXTURES, VISION_LIKE
from verl.modeling.vision import language_model_of

logger = logging.getLogger("verl.modeling")

Kernels = Literal["plain", "fused", "liger", "compiled", "batch_invariant"]


def use_kernels(module: nn.Module, kernels: Kernels, cache: WeightCache) -> None:
    """Select the kernels of a model's layers, in place.

    Args:
        module: a HuggingFace decoder. With "fused", a model type that is not supported stays plain, which is logged.
        kernels: the kernels to use.
        cache: tells "fused" and FP8 layers when the weights do not change.

    Raises:
        ValueError: Liger is selected but not installed, or does not support the model.
    """
    for layer in module.modules():
        if isinstance(layer, Fp8Linear):
            layer.cache = cache
    if kernels == "fused":
        if language_model_of(module).config.model_type not in (*LLAMA_LIKE, *MIXTURES, *VISION_LIKE):
            logger.info("%s: fused kernels are not supported, layers run as in transformers", module.config.model_type)
            return
        fuse(module, cache)
    elif kernels == "liger":
        _use_liger(module)
    elif kernels == "batch_invariant":
        from verl.modeling.batch_invariant.model import use_batch_invariant

        use_batch_invariant(module)
    elif kernels == "compiled":
        layer_classes = set(module._no_split_modules or ())
        for layer in module.modules():
            if type(layer).__name__ in layer_classes:
                layer.compile(dynamic=True)


def _use_liger(module: nn.Module) -> None:
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ModuleNotFoundError as error:
        raise ValueError("model.use_liger needs the package liger-kernel: install it, or set it to false") from error
    model_type = module.config.model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"model.use_liger: Liger does not support the model type {model_type!r}: set it to false")
    _apply_liger_kernel_to_instance(module)
