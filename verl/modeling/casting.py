"""Computation in another dtype than that of the parameters: by autocast, or by casts where parameters are used.

torch.autocast computes in 16 bits only, and never casts float64. For float32 computation with bf16 parameters, for
example, every layer casts its parameters when it is called. FSDP does the same itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def autocast_dtype(stored: torch.dtype, computed: torch.dtype | None) -> torch.dtype | None:
    """The dtype of the autocast from parameters to the computation; None: they agree, or autocast cannot."""
    can_cast = computed is not None and computed.itemsize == 2 and stored.itemsize <= 4
    return computed if can_cast and computed != stored else None


def cast_at_use(module: nn.Module, dtype: torch.dtype) -> None:
    """Let every layer of a transformers model compute with its parameters cast to `dtype`, in place.

    The parameters, their names and the dtype of their gradients do not change.
    """
    layer_classes = set(module._no_split_modules or ())
    within: set[nn.Module] = set()  # the modules of a block, such as the attention, which may read their parameters
    for each in module.modules():
        if type(each).__name__ in layer_classes:  # checkpointing repeats its forward pass, but not `each.forward`
            for block in each.children():
                _cast_in(block, [*block.modules()], dtype)
                within.update(block.modules())
        if each not in within:
            _cast_in(each, [each], dtype)


def _cast_in(module: nn.Module, owners: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Replace the parameters of `owners` by casts, through which gradients flow, while `module` computes."""
    if not any(owner._parameters for owner in owners):
        return
    forward = module.forward

    @functools.wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        originals = [dict(owner._parameters) for owner in owners]
        try:
            for owner, parameters in zip(owners, originals):
                floats = {name: p for name, p in parameters.items() if p is not None and p.is_floating_point()}
                owner._parameters.update({name: p.to(dtype) for name, p in floats.items()})
            return forward(*args, **kwargs)
        finally:
            for owner, parameters in zip(owners, originals):
                owner._parameters.update(parameters)

    module.forward = cast
