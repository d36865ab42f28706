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
        self._sent: dict[str, torch.Tensor] = {}  # sums of every tensor
        self._expected: dict[str, torch.Tensor] = {}  # of what the receiver stores

    def load(self, part: Part) -> int:
        """Load a part and verify it.

        Returns:
            The checksum of its tensors.

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
        return combine(list(self._sent.values()))

    def _read(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.bytes += tensor.numel() * tensor.element_size()
            stored = self._stored(name)
            sent = sums_of(bytes_of(tensor if stored is None else tensor.to(stored.dtype)))
            self._sent[name] = sent
            if stored is not None:
                kept = self.receiver.slice_of(name, tensor)
                self._expected[name] = sent if kept is tensor else sums_of(bytes_of(kept.to(stored.dtype)))
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
