"""Sync of LoRA adapters (Hu et al. 2021, arXiv 2106.09685): the base weights are sent once, then only the adapters.

An engine that cannot apply adapters merges them into a copy of the base weights that it keeps: W + scaling * B A is
computed from that copy in every push, so rounding errors do not add up.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from verl.weight_sync.base import AdapterConfig, AdapterSource, WeightSource

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass
class Part:
    """Tensors that a receiver loads with one call: weights (config is None), or adapters."""

    config: AdapterConfig | None
    tensors: Iterable[tuple[str, torch.Tensor]]


def parts_of(engine: WeightSource | AdapterSource, adapters: bool, has_base: bool) -> list[Part]:
    """What a push sends.

    Args:
        engine: the training engine.
        adapters: whether adapters are sent separately from the base weights. Requires an `AdapterSource`.
        has_base: whether the receivers have the base weights.
    """
    if not adapters:
        return [Part(None, engine.weights())]
    delta = Part(engine.adapter_config(), engine.adapter_weights())
    return [delta] if has_base else [Part(None, engine.base_weights()), delta]


class MergedAdapters:
    """Merges adapters into the parameters of an engine, from a copy of the base weights of the adapted layers.

    Args:
        parameters: HuggingFace name -> the engine's parameter, which is overwritten.
        slice_of: (HuggingFace name, full tensor) -> the slice that the engine stores.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], slice_of: Callable[[str, torch.Tensor], torch.Tensor]):
        self._parameters = parameters
        self._slice_of = slice_of
        self._base: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        """Forget the base weights: others have been loaded."""
        self._base.clear()

    @torch.no_grad()
    def merge(self, config: AdapterConfig, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Set every adapted weight to base + scaling * B A. Raises ValueError for tensors that are not pairs."""
        for layer, a, b in pairs_of(tensors, version):
            name = f"{layer}.weight"
            weight = self._parameters[name]
            base = self._base.setdefault(layer, weight.detach().clone())
            dtype = torch.promote_types(base.dtype, a.dtype)
            a, b = a.to(base.device, dtype), b.to(base.device, dtype)
            weight.copy_(base.to(dtype) + self._slice_of(name, b @ a) * config["scaling"][layer])


def pairs_of(
    tensors: Iterable[tuple[str, torch.Tensor]], version: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (layer, A, B) of adapters that are sent as (PEFT name, tensor).

    Raises:
        ValueError: a tensor that is not a LoRA matrix, or a layer with only one of the two.
    """
    halves: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        layer, end = _layer_of(name, version)
        other = halves.pop(layer, None)
        if other is None:
            halves[layer] = tensor.clone()  # valid until the next one is read
        else:
            yield (layer, tensor, other) if end == _A else (layer, other, tensor)
    if halves:
        raise ValueError(f"adapters of version {version}: one of lora_A and lora_B of {sorted(halves)[0]} is missing")


def _layer_of(name: str, version: int) -> tuple[str, str]:
    end = next((end for end in (_A, _B) if name.endswith(end)), None)
    if end is None or not name.startswith(_PREFIX):
        raise ValueError(f"adapters of version {version}: expected names <layer>{_A} and <layer>{_B}, found {name!r}")
    return name.removeprefix(_PREFIX).removesuffix(end), end


def sends_adapters(setting: str, has_adapters: bool, accepts_adapters: bool, cheaper: bool) -> bool:
    """Whether only the adapters are pushed.

    Args:
        setting: `rollout.lora_sync`: auto, merged or adapters.
        has_adapters: whether the policy is trained with LoRA.
        accepts_adapters: whether the engine accepts adapters.
        cheaper: whether `auto` prefers adapters: they cross processes, or the engine applies them without merging.

    Raises:
        ValueError: adapters are required, but the engine does not take them.
    """
    if setting == "adapters" and has_adapters and not accepts_adapters:
        raise ValueError(
            "rollout.lora_sync=adapters: expected a rollout engine whose receiver takes adapters (AdapterReceiver): "
            "use lora_sync=merged"
        )
    return has_adapters and accepts_adapters and (setting == "adapters" or (setting == "auto" and cheaper))
