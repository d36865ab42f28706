"""The layers of experts in vLLM's model, whose kernels for a CPU compute with packed weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

#: vLLM's kernels that compute with `w13_weight` and `w2_weight` as they are loaded; those for a CPU pack them
_PLAIN, _PACKED = "TRITON", "CPU"


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> the module with `w13_weight` and `w2_weight`, of every layer with experts.

    Raises:
        ValueError: they are computed by kernels with another layout.
    """
    layers = {name: layer for name, layer in model.named_modules() if "w13_weight" in layer._parameters}
    for name, layer in layers.items():
        kernels = _kernels_of(layer)
        if kernels not in (_PLAIN, _PACKED):
            raise ValueError(
                f"rollout.name=vllm: expected experts that are computed by vLLM's kernels {_PLAIN}, or {_PACKED} on a "
                f"CPU, found {kernels} for {name}: weights cannot be pushed into their layout; use rollout.name=native"
            )
    return layers


def _kernels_of(layer: nn.Module) -> str:
    method = layer.quant_method
    return getattr(getattr(method, "unquantized_backend", None), "name", type(method).__name__)


def packed_layers(layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of `expert_layers` whose kernels compute with packed weights."""
    return {name: layer for name, layer in layers.items() if _kernels_of(layer) == _PACKED}


@contextmanager
def unpacked(layers: dict[str, nn.Module]) -> Iterator[None]:
    """Context in which the weights of experts have the layout in which they are loaded. Its end packs them again.

    Only kernels for a CPU have another layout: blocks of rows, padded.
    """
    packed = packed_layers(layers)
    for layer in packed.values():
        experts, hidden = len(layer.w13_weight), layer.hidden_size
        width = layer.moe_config.intermediate_size_per_partition
        _replace(layer, "w13_weight", layer.w13_weight.new_empty(experts, 2 * width, hidden))
        _replace(layer, "w2_weight", layer.w2_weight.new_empty(experts, hidden, width))
    yield
    for layer in packed.values():
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _replace(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    from vllm.model_executor.utils import replace_parameter

    replace_parameter(layer, name, tensor)
