"""The contracts of a weight sync: what a training engine provides, what a rollout engine receives, and the report."""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from verl.utils.shards import Shard

if TYPE_CHECKING:
    from verl.weight_sync.reshard.plan import Stored


@dataclass(frozen=True)
class SyncReport:
    """Result of one push."""

    version: int  # weight version
    bytes: int = 0  # sent to each rollout rank
    seconds: float = 0.0  # duration of the push
    checksum: int = 0  # of the full parameters that arrived, the same on all ranks; 0 if none was computed
    kept: int = 0  # bytes that the rollout rank had already and that were not sent to it


class WeightSource(Protocol):
    """The part of a training engine that a sync reads (see verl.engines.base.TrainEngine)."""

    def rollout_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, full tensor) of every parameter, adapters merged, cast to `dtype`. None: not cast.
        Collective: all ranks must iterate."""


@runtime_checkable
class ShardSource(WeightSource, Protocol):
    """A training engine whose shards can be read without gathering them."""

    # the replicas of the weights that this rank belongs to, the smallest one first. Ranks with the same number hold the
    # weights together, or those of the experts. Empty: one replica.
    replicas: tuple[int, ...]

    def shard_layout(self) -> Sequence[Shard] | None:
        """Which chunk of each parameter this rank has; the same object in every call. None: use
        `rollout_weights`."""

    def shards(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that `shard_layout` describes, in that order. Collective."""


class WeightReceiver(Protocol):
    """The rollout engine's side of a weight sync."""

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load all parameters, by HuggingFace name: iterate to the end of `weights`. A tensor is valid until the next
        one is read. Raises ValueError for missing or unknown parameters."""

    def release(self) -> None:
        """Free the weights until the next `receive`."""


class StoredWeights(ABC):
    """A receiver whose loaded parameters can be read: a sync compares their checksums with what was sent, after the
    first push and every `rollout.check_every` versions."""

    @abstractmethod
    def stored(self, name: str) -> torch.Tensor | None:
        """The tensor that is stored for a loaded parameter; None if the engine stores it in another form."""

    def slice_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """The slice of a sent parameter that is stored, such as that of a tensor-parallel rank. Default: all of it."""
        return full


class SlicedWeights(ABC):
    """A receiver with a layout of what it stores of each parameter, into which a sync writes."""

    #: whether a sync writes them by default: few bytes are needed, or `receive` is slower
    prefers_slices: bool = False

    @abstractmethod
    def slice_layout(self) -> "Mapping[str, Stored]":
        """HuggingFace name -> what this rank stores of the parameter; the same object in every call."""

    @abstractmethod
    def open_slices(self, version: int) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Context of a push: name -> the contiguous tensor to write into. The engine has no weights until its end, nor
        after an error."""


class ReceivesWeights(Protocol):
    """What a weight sync uses of a rollout engine."""

    #: number of completed training steps of the engine's weights
    weight_version: int

    def receiver(self) -> "WeightReceiver | None":
        """The receiver of new weights; None for an engine that generates with the trainer's parameters."""


class WeightSync(ABC):
    """Copies the weights of a training engine to the rollout engines.

    Args:
        check_every: versions between two pushes after which what the engines store is compared with what was sent, the
            first push included; 0: none.
    """

    def __init__(self, check_every: int = 1):
        self.check_every = check_every
        self._last_check: int | None = None

    def push(self, engine: WeightSource, version: int) -> SyncReport:
        """Push the current weights. Called on every training rank.

        Raises:
            ValueError: the engines did not receive the weights, or do not store them.
        """
        compares = is_check_due(version, self._last_check, self.check_every)
        start = time.perf_counter()
        report = self._push(engine, version, compares)
        if compares:
            self._last_check = version
        return replace(report, seconds=time.perf_counter() - start)

    @abstractmethod
    def _push(self, engine: WeightSource, version: int, compares: bool) -> SyncReport:
        """Push the weights; `push` measures the seconds. compares: whether to compare what the engines store with
        them."""


def is_check_due(version: int, last_check: int | None, every: int) -> bool:
    """Whether the weights of a version are checked: the first ones, then those of every multiple of `every`.

    Args:
        version: weight version.
        last_check: version of the last check; None: there was none.
        every: `rollout.check_every`; 0: no version is checked.
    """
    return every > 0 and (last_check is None or (version % every == 0 and version != last_check))


def check_parameters(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, torch.Size], version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a push, and check that each of `shapes` is sent once.

    Raises:
        ValueError: unknown, repeated or missing parameters, or another shape.
    """
    missing = set(shapes)
    for name, tensor in weights:
        if name not in missing:
            raise ValueError(f"weights of version {version}: parameter {name!r} is unknown or was sent twice")
        if shapes[name] != tensor.shape:
            raise ValueError(
                f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shapes[name])}"
            )
        missing.remove(name)
        yield name, tensor
    if missing:
        raise ValueError(f"weights of version {version}: {len(missing)} are missing, first {sorted(missing)[:3]}")


def describe_error(error: BaseException) -> str:
    """Type and message of an error, for other processes. Valid UTF-8: surrogates of a path are replaced."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.encode(errors="replace").decode()


def require_weights(filled: bool) -> None:
    """Raise ValueError for an engine that has no weights."""
    if not filled:
        raise ValueError("the rollout engine has no weights: push them first (WeightSync.push)")


class InProcessSync(WeightSync):
    """The rollout engine generates with the trainer's parameters: nothing to copy."""

    def __init__(self, rollout: ReceivesWeights):
        super().__init__(check_every=0)
        self.rollout = rollout

    def _push(self, engine: WeightSource, version: int, compares: bool) -> SyncReport:
        self.rollout.weight_version = version
        return SyncReport(version)
