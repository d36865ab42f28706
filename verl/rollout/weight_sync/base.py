"""The contracts of a weight sync: what a training engine gives, what a rollout engine receives, and the report."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class SyncReport:
    """Result of one push. bytes: sent to each rollout rank. checksum: of all buckets; 0 if nothing was sent."""

    version: int
    bytes: int = 0
    seconds: float = 0.0
    checksum: int = 0


class WeightSource(Protocol):
    """The part of a training engine that a sync reads (see verl.engines.base.TrainEngine)."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, full tensor) of every parameter, adapters merged. Collective: all ranks must
        iterate."""


class WeightReceiver(Protocol):
    """The rollout engine's side."""

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load all parameters, by HuggingFace name: iterate to the end of `weights`. Raises ValueError for missing or
        unknown parameters."""

    def release(self) -> None:
        """Free the weights until the next `receive`."""


class WeightSync(ABC):
    """Copies the weights of a training engine to the rollout engines."""

    @abstractmethod
    def push(self, engine: WeightSource, version: int) -> SyncReport:
        """Push the current weights. Called on every training rank."""


def incomplete(receiver: WeightReceiver) -> ValueError:
    return ValueError(f"{type(receiver).__name__}.receive returned before it had read all weights")
