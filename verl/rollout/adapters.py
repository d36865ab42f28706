"""LoRA adapters that the engine of another library applies without merging them (`rollout.lora_sync`)."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl.config import schema
from verl.rollout.base import RolloutEnv
from verl.weight_sync.adapters import matrix_pairs
from verl.weight_sync.base import AdapterConfig, AdapterReceiver

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdaptedLayers:
    """The layers of the policy whose adapters are trained.

    Attributes:
        names: HuggingFace names of the linear layers.
        rank: the largest rank of a layer.
        has_one_rank: whether all layers have it.
    """

    names: tuple[str, ...]
    rank: int
    has_one_rank: bool = True

    @classmethod
    def from_config(cls, config: AdapterConfig) -> "AdaptedLayers":
        """The layers of an adapter configuration (`TrainEngine.adapter_config`)."""
        ranks = {config["r"], *(config.get("rank_pattern") or {}).values()}
        return cls(tuple(config["scaling"]), max(ranks), len(ranks) == 1)

    @property
    def modules(self) -> list[str]:
        """The last parts of the names, such as q_proj."""
        return sorted({name.rpartition(".")[2] for name in self.names})


class AppliedAdapters(AdapterReceiver):
    """A base class of receivers that apply adapters, in front of the engine's receiver of weights.

    After `receive`, the engine has the base weights, but does not generate before it has adapters.
    """

    applies_adapters = True
    filled: bool
    shapes: Mapping[str, torch.Size]

    def __init__(self, *args: Any, layers: AdaptedLayers, **keys: Any):
        """layers: the layers with adapters; the others are arguments of the receiver of weights."""
        super().__init__(*args, **keys)
        self._layers = layers

    def check_filled(self) -> None:
        """Raise ValueError unless the base weights and the adapters have been received."""
        if self.has_base and not self.filled:
            raise ValueError(
                "the rollout engine has the base weights, but no adapters: push them first (WeightSync.push), or set "
                "rollout.lora_sync=merged"
            )
        super().check_filled()

    @torch.no_grad()
    def receive_adapters(
        self, config: AdapterConfig, tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """See `AdapterReceiver.receive_adapters`. Requests of `generate_one` may be running, as in `receive`.

        Raises:
            ValueError: no base weights, unknown, repeated or missing layers, another shape, or adapters that the engine
                did not load.
        """
        if not self.has_base:
            super().check_filled()
        self._load_adapters(config["scaling"], checked_pairs(tensors, self._layers, self.shapes, version), version)

    @abstractmethod
    def _load_adapters(
        self, scaling: Mapping[str, float], pairs: Iterator[tuple[str, torch.Tensor, torch.Tensor]], version: int
    ) -> None:
        """Load and verify adapters. scaling: layer -> factor of B A. pairs: (layer, A, B)."""


def applied_layers(
    engine: str,
    config: schema.RolloutEngineConfig,
    env: RolloutEnv,
    obstacles: Callable[[AdaptedLayers], Iterator[str]],
) -> AdaptedLayers | None:
    """The layers whose adapters an engine applies; None: it gets merged weights. The log of rank 0 says which, and why.

    Args:
        engine: vllm or sglang.
        config: the `rollout` section.
        env: with the layers that the trainer adapts.
        obstacles: yields why the engine cannot apply the adapters of these layers.

    Raises:
        ValueError: `lora_sync=adapters`, and it cannot apply them.
    """
    layers, log_line = env.adapted_layers, log.info if env.rank == 0 else log.debug
    if layers is None or not isinstance(config, schema.RolloutConfig):
        return None
    if config.lora_sync == "merged":
        log_line("rollout.lora_sync=merged: %s gets all weights in every push, adapters merged", engine)
        return None
    reasons = list(obstacles(layers))
    if not reasons:
        log_line(
            "rollout.lora_sync=%s: %s applies the adapters of %d layers (rank %d); the base weights are pushed once",
            *(config.lora_sync, engine, len(layers.names), layers.rank),
        )
        return layers
    if config.lora_sync == "adapters":
        raise ValueError(
            f"rollout.lora_sync=adapters: {engine} cannot apply these adapters: {'; '.join(reasons)}: set "
            "rollout.lora_sync=merged"
        )
    log_line("rollout.lora_sync=auto: %s gets merged weights in every push: %s", engine, "; ".join(reasons))
    return None


def checked_pairs(
    tensors: Iterable[tuple[str, torch.Tensor]], layers: AdaptedLayers, shapes: Mapping[str, torch.Size], version: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (layer, A, B) of a push, and check that each layer is sent once.

    Args:
        tensors: (PEFT name, tensor).
        layers: the layers with adapters.
        shapes: HuggingFace name -> shape of every parameter of the base model.
        version: weight version, for errors.

    Raises:
        ValueError: unknown, repeated or missing layers, or another shape.
    """
    missing = set(layers.names)
    for layer, a, b in matrix_pairs(tensors, version):
        if layer not in missing:
            raise ValueError(f"adapters of version {version}: layer {layer!r} is unknown or was sent twice")
        rows, columns = shapes[f"{layer}.weight"]
        if (a.shape[1], b.shape[0]) != (columns, rows) or not a.shape[0] == b.shape[1] <= layers.rank:
            raise ValueError(
                f"adapters of version {version}: {layer} has A {tuple(a.shape)} and B {tuple(b.shape)}, expected "
                f"(r, {columns}) and ({rows}, r) with r up to {layers.rank}"
            )
        missing.remove(layer)
        yield layer, a, b
    if missing:
        raise ValueError(f"adapters of version {version}: {len(missing)} are missing, first {sorted(missing)[:3]}")
