"""LoRA adapters that the engine of another library applies without merging them (`rollout.lora_sync`)."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from verl.config import schema
from verl.rollout.base import RolloutEnv
from verl.rollout.weight_sync.base import AdapterConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdaptedLayers:
    """The layers of the policy whose adapters are trained.

    Attributes:
        names: HuggingFace names of the linear layers.
        rank: the largest rank of a layer.
    """

    names: tuple[str, ...]
    rank: int

    @classmethod
    def of(cls, config: AdapterConfig) -> "AdaptedLayers":
        """The layers of an adapter configuration (`TrainEngine.adapter_config`)."""
        return cls(tuple(config["scaling"]), max([config["r"], *(config.get("rank_pattern") or {}).values()]))

    @property
    def modules(self) -> list[str]:
        """The last parts of the names, such as q_proj."""
        return sorted({name.rpartition(".")[2] for name in self.names})


def applied_layers(
    engine: str,
    config: schema.RolloutEngineConfig,
    env: RolloutEnv,
    obstacles: Callable[[AdaptedLayers], Iterator[str]],
) -> AdaptedLayers | None:
    """The layers whose adapters an engine applies; None: it gets merged weights. The log says which, and why.

    Args:
        engine: vllm or sglang.
        config: the `rollout` section.
        env: with the layers that the trainer adapts.
        obstacles: yields why the engine cannot apply the adapters of these layers.

    Raises:
        ValueError: `lora_sync=adapters`, and it cannot apply them.
    """
    layers = env.adapted_layers
    if layers is None or not isinstance(config, schema.RolloutConfig):
        return None
    if config.lora_sync == "merged":
        log.info("rollout.lora_sync=merged: %s gets all weights in every push, adapters merged", engine)
        return None
    found = ["weight_sync=disk writes merged weights"] if config.weight_sync == "disk" else []
    found += obstacles(layers)
    if not found:
        log.info(
            "rollout.lora_sync=%s: %s applies the adapters of %d layers (rank %d); the base weights are pushed once",
            *(config.lora_sync, engine, len(layers.names), layers.rank),
        )
        return layers
    if config.lora_sync == "adapters":
        raise ValueError(
            f"rollout.lora_sync=adapters: {engine} cannot apply these adapters: {'; '.join(found)}: set "
            "rollout.lora_sync=merged"
        )
    log.info("rollout.lora_sync=auto: %s gets merged weights in every push: %s", engine, "; ".join(found))
    return None
