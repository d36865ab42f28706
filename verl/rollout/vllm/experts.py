"""Weights of a mixture of experts in vLLM: their names, and the packed weights of its kernels for a CPU.

transformers has the weights of all experts of a layer in two parameters, `experts.gate_up_proj` (E, 2 I, H) and
`experts.down_proj` (E, H, I), and so has vLLM: `w13_weight` and `w2_weight`, or the slices of a rank. In between,
vLLM's loaders read the names of checkpoints, one tensor per expert and projection.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

#: parameters of transformers -> the parameter of vLLM, and the projections in checkpoints: of Mixtral, of others
_FUSED = {
    "gate_up_proj": ("w13_weight", ("w1", "w3"), ("gate_proj", "up_proj")),
    "down_proj": ("w2_weight", ("w2",), ("down_proj",)),
}
_MIXTRAL = ".block_sparse_moe."
#: vLLM's kernels that compute with `w13_weight` and `w2_weight` as they are loaded; those for a CPU pack them
_PLAIN, _PACKED = "TRITON", "CPU"
#: largest error of an expert that is computed by a packed kernel, relative to the norm of its output
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class ExpertNames:
    """Names of the parameters of a mixture of experts, for one model of vLLM; others are kept.

    Args:
        parameters: names of vLLM's parameters.
    """

    def __init__(self, parameters: Collection[str]):
        self._parameters = parameters
        self._is_mixtral = any(_MIXTRAL in name for name in parameters)

    def renamed(self, name: str) -> str:
        """The name with the modules of a checkpoint."""
        return name.replace(".mlp.", _MIXTRAL) if self._is_mixtral else name

    def target(self, name: str) -> str | None:
        """vLLM's parameter for the weights of all experts of a layer; None for another parameter."""
        path, kind = self._split(name)
        found = (f"{path}.{inner}{_FUSED[kind][0]}" for inner in ("routed_experts.", "")) if kind else ()
        return next((each for each in found if each in self._parameters), None)

    def unfused(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a checkpoint: one per expert and projection, or the tensor itself."""
        path, kind = self._split(name)
        if not kind:
            yield self.renamed(name), tensor
            return
        projections = _FUSED[kind][1 if self._is_mixtral else 2]
        for index, expert in enumerate(tensor):
            for projection, chunk in zip(projections, expert.chunk(len(projections))):
                yield f"{path}.{index}.{projection}.weight", chunk

    def _split(self, name: str) -> tuple[str, str]:
        """(path of the experts, key of `_FUSED`); the key is empty for another parameter."""
        path, _, kind = self.renamed(name).rpartition(".")
        return (path, kind) if path.endswith(".experts") and kind in _FUSED else (path, "")


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


@contextmanager
def unpacked(layers: dict[str, nn.Module], version: int) -> Iterator[None]:
    """Context in which the weights of experts have the layout in which they are loaded. Its end packs them again.

    Only kernels for a CPU have another layout: blocks of rows, padded.

    Raises:
        ValueError: at the end, if a layer does not compute with the weights that were loaded.
    """
    packed = {name: layer for name, layer in layers.items() if _kernels_of(layer) == _PACKED}
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
