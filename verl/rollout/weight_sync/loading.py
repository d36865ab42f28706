"""Loads one push into a receiver, and verifies that what the receiver stores is what was sent."""

from collections.abc import Iterable, Iterator

import torch

from verl.rollout.weight_sync.adapters import Part
from verl.rollout.weight_sync.base import AdapterReceiver, StoredWeights, WeightReceiver, incomplete
from verl.rollout.weight_sync.checksums import COLUMNS, bytes_of, combine, sums_of


class Loading:
    """Loads one part of a push into a receiver, and verifies it.

    Attributes:
        complete: whether the receiver has read all weights.
        bytes: read so far.
    """

    def __init__(self, receiver: WeightReceiver, version: int):
        self.receiver = receiver
        self.version = version
        self.complete = False
        self.bytes = 0
        self._read_sums: dict[str, torch.Tensor] = {}  # of what is stored of each tensor: all of it, or a slice
        self._expected: dict[str, torch.Tensor] = {}  # those that can be compared

    def load(self, part: Part) -> int:
        """Load a part and verify it.

        Returns:
            The checksum of its tensors; of a receiver of slices: that of the slices.

        Raises:
            ValueError: the receiver cannot load it, did not read all of it, or stores other values.
        """
        if part.config is None:
            self.receiver.receive(self._read(part.tensors), self.version)
        elif isinstance(self.receiver, AdapterReceiver):
            self.receiver.receive_adapters(part.config, self._read(part.tensors), self.version)
        else:
            raise ValueError(f"{type(self.receiver).__name__} takes no adapters: set rollout.lora_sync=merged")
        if not self.complete:
            raise incomplete(self.receiver)
        self._verify()
        return combine(list(self._read_sums.values()))

    def _read(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.bytes += tensor.numel() * tensor.element_size()
            stored, kept = self._stored(name), tensor
            if stored is not None:
                kept = self.receiver.slice_of(name, tensor).to(stored.dtype)
            sums = self._read_sums[name] = sums_of(bytes_of(kept))
            if stored is not None:
                self._expected[name] = sums
            yield name, tensor
        self.complete = True

    def _stored(self, name: str) -> torch.Tensor | None:
        return self.receiver.stored(name) if isinstance(self.receiver, StoredWeights) else None

    def _verify(self) -> None:
        """Raise ValueError, with the name, for a parameter that is not stored as it was sent."""
        stored = {name: tensor for name in self._expected if (tensor := self._stored(name)) is not None}
        if not stored:
            return
        found = {name: sums_of(bytes_of(tensor)) for name, tensor in stored.items()}
        wrong = [name for name in found if found[name].shape != self._expected[name].shape]
        if not wrong:
            every = torch.cat(list(found.values()))
            sent = torch.cat([self._expected[name] for name in found]).to(every.device)
            if torch.equal(every, sent):
                return
            wrong = [name for name in found if not torch.equal(found[name], self._expected[name].to(every.device))]
        raise ValueError(
            f"weights of version {self.version} were not loaded: after {type(self.receiver).__name__}.receive, "
            f"{len(wrong)} of {len(stored)} parameters differ from what was sent, first {wrong[:3]}"
        )


def transit_fault(bytes_sent: torch.Tensor, found: torch.Tensor) -> int | None:
    """The first row whose sum differs, -1 if only a column differs, and None if the sums are equal."""
    differs = (bytes_sent != found).nonzero()
    if not len(differs):
        return None
    first = int(differs[0])
    return first if first < len(found) - COLUMNS else -1
