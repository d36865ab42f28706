"""The layers of experts in vLLM's model, whose kernels for a CPU compute with packed weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

#: vLLM's kernels that compute with `w13_weight` and `w2_weight` as they are loaded; those for a CPU pack them
_PLAIN, _PACKED = "TRITON", "CPU"
#: largest error of an expert that is computed by a packed kernel, relative to the norm of its output
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> the module with `w13_weight` and `w2_weight`, of every layer with experts.

    Raises:
        ValueError: they are computed by kernels with another layout.
    """
    found = {name: layer for name, layer in model.named_modules() if "w13_weight" in layer._parameters}
    for name, layer in found.items():
        kernels = _kernels_of(layer)
        if kernels not in (_PLAIN, _PACKED):
            raise ValueError(
                f"rollout.name=vllm: expected experts that are computed by vLLM's kernels {_PLAIN}, or {_PACKED} on a "
                f"CPU, found {kernels} for {name}: weights cannot be pushed into their layout; use rollout.name=native"
            )
    return found


def _kernels_of(layer: nn.Module) -> str:
    method = layer.quant_method
    return getattr(getattr(method, "unquantized_backend", None), "name", type(method).__name__)


def packed_layers(layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of `expert_layers` whose kernels compute with packed weights."""
    return {name: layer for name, layer in layers.items() if _kernels_of(layer) == _PACKED}


@contextmanager
def unpacked(layers: dict[str, nn.Module], version: int) -> Iterator[None]:
    """Context in which the weights of experts have the layout in which they are loaded. Its end packs them again.

    Only kernels for a CPU have another layout: blocks of rows, padded.

    Raises:
        ValueError: at the end, if a layer does not compute with the weights that were loaded.
    """
    packed = packed_layers(layers)
    for layer in packed.values():
        experts, hidden = len(layer.w13_weight), layer.hidden_size
        width = layer.moe_config.intermediate_size_per_partition
        _replace(layer, "w13_weight", layer.w13_weight.new_empty(experts, 2 * width, hidden))
        _replace(layer, "w2_weight", layer.w2_weight.new_empty(experts, hidden, width))
    yield
    for name, layer in packed.items():
        loaded = layer.w13_weight, layer.w2_weight
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        _check_packed(name, layer, *loaded, version)


def _replace(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    from vllm.model_executor.utils import replace_parameter

    replace_parameter(layer, name, tensor)


def _check_packed(name: str, layer: nn.Module, w13: torch.Tensor, w2: torch.Tensor, version: int) -> None:
    """Raise ValueError unless each expert of a layer computes with `w13` (E, 2 I, H) and `w2` (E, H, I)."""
    experts, _, hidden = w13.shape
    # in [-1, 1], without random numbers
    x = torch.cos(torch.arange(experts * hidden, device=w13.device)).reshape(experts, hidden).to(w13.dtype)
    local = torch.arange(experts) if layer.expert_map is None else (layer.expert_map >= 0).nonzero().flatten()
    weights, chosen = torch.ones(experts, 1), local[:, None].to(torch.int32)  # token i is sent to expert i only
    found = layer.quant_method.apply(layer, x, weights, chosen, None, None).float()
    gate, up = torch.einsum("eoh,eh->eo", w13.float(), x.float()).chunk(2, -1)
    expected = torch.einsum("eoh,eh->eo", w2.float(), F.silu(gate) * up)
    error = float(((found - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-12)).max())
    if not error < _TOLERANCE[w13.dtype]:
        raise ValueError(
            f"weights of version {version}: vLLM's experts {name} do not compute with the weights that were sent "
            f"(relative error {error:.2g}): the rollout engine would generate with stale weights"
        )
