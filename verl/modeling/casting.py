"""Computation in another dtype than that of the parameters: by autocast, or by casts where parameters are used.

torch.autocast computes in 16 bits only, and never casts float64. For float32 computation with bf16 parameters, for
example, every layer casts its parameters when it is called (`cast_at_use`), also when activation checkpointing calls it
again. FSDP does the same itself.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
                _wrap(block, [*block.modules()], dtype)
                within.update(block.modules())
        if each not in within:
            _wrap(each, [each], dtype)


def _wrap(module: nn.Module, owners: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Cast the parameters of `owners` while `module` computes."""
    if any(owner._parameters for owner in owners):
        module.forward = _with_casts(module.forward, owners, dtype)


def _with_casts(forward: Callable[..., Any], owners: Sequence[nn.Module], dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with _cast_parameters(owners, dtype):
            return forward(*args, **kwargs)

    return cast


@contextmanager
def _cast_parameters(owners: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Replace the floating-point parameters of modules by casts, through which gradients flow."""
    originals = [dict(owner._parameters) for owner in owners]
    try:
        for owner in owners:
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    owner._parameters[name] = parameter.to(dtype)
        yield
    finally:
        for owner, parameters in zip(owners, originals):
            owner._parameters.update(parameters)
