"""Sync of LoRA adapters (Hu et al. 2021, arXiv 2106.09685) to an engine that applies them: the base weights are sent
once, then only the adapters. Other engines get merged weights in every push.
"""

from collections.abc import Iterable, Iterator
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


def push_parts(
    engine: WeightSource | AdapterSource, dtype: torch.dtype | None, adapters: bool, has_base: bool
) -> list[Part]:
    """What a push sends.

    Args:
        engine: the training engine.
        dtype: of the weights; None: not cast. Adapters are not cast.
        adapters: whether adapters are sent separately from the base weights. Requires an `AdapterSource`.
        has_base: whether the receivers have the base weights.
    """
    if not adapters:
        return [Part(None, engine.rollout_weights(dtype))]
    delta = Part(engine.adapter_config(), engine.adapter_weights())
    return [delta] if has_base else [Part(None, engine.base_weights(dtype)), delta]


def matrix_pairs(
    tensors: Iterable[tuple[str, torch.Tensor]], version: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (layer, A, B) of adapters that are sent as (PEFT name, tensor).

    Raises:
        ValueError: a tensor that is not a LoRA matrix, or a layer with only one of the two.
    """
    halves: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        layer, end = _layer_and_suffix(name, version)
        other = halves.pop(layer, None)
        if other is None:
            halves[layer] = tensor.clone()  # valid until the next one is read
        else:
            yield (layer, tensor, other) if end == _A else (layer, other, tensor)
    if halves:
        raise ValueError(f"adapters of version {version}: one of lora_A and lora_B of {sorted(halves)[0]} is missing")


def _layer_and_suffix(name: str, version: int) -> tuple[str, str]:
    end = next((end for end in (_A, _B) if name.endswith(end)), None)
    if end is None or not name.startswith(_PREFIX):
        raise ValueError(f"adapters of version {version}: expected names <layer>{_A} and <layer>{_B}, found {name!r}")
    return name.removeprefix(_PREFIX).removesuffix(end), end


def sends_adapters(setting: str, has_adapters: bool, accepts_adapters: bool) -> bool:
    """Whether only the adapters are pushed.

    Args:
        setting: `rollout.lora_sync`: auto, merged or adapters.
        has_adapters: whether the policy is trained with LoRA.
        accepts_adapters: whether the receiver of the engine is an `AdapterReceiver`.

    Raises:
        ValueError: adapters are required, but the engine does not accept them.
    """
    if setting == "adapters" and has_adapters and not accepts_adapters:
        raise ValueError(
            "rollout.lora_sync=adapters: expected a rollout engine whose receiver accepts adapters (AdapterReceiver): "
            "use lora_sync=merged"
        )
    return has_adapters and accepts_adapters and setting != "merged"
