"""Loads one push into a receiver, and verifies that what the receiver stores is what was sent."""

from collections.abc import Iterable, Iterator

import torch

from verl.weight_sync.adapters import Part
from verl.weight_sync.base import AdapterReceiver, StoredWeights, WeightReceiver, incomplete
from verl.weight_sync.checksums import COLUMNS, TensorSums, combine


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
        self._names: list[str] = []  # of what the receiver stores
        self._sent, self._others = TensorSums(), TensorSums()  # others: of what it stores in another form
        is_whole = isinstance(receiver, StoredWeights) and type(receiver).slice_of is StoredWeights.slice_of
        self._expected = self._sent if is_whole else TensorSums()  # of what it stores

    def load(self, part: Part) -> int:
        """Load a part and verify it.

        Returns:
            The checksum of its tensors.

        Raises:
            ValueError: the receiver cannot load it, did not read all of it, or stores other values, which are released.
        """
        if part.config is None:
            self.receiver.receive(self._read(part.tensors), self.version)
        elif isinstance(self.receiver, AdapterReceiver):
            self.receiver.receive_adapters(part.config, self._read(part.tensors), self.version)
        else:
            raise ValueError(f"{type(self.receiver).__name__} takes no adapters: set rollout.lora_sync=merged")
        if not self.complete:
            raise incomplete(self.receiver)
        self._sent.finish()
        self._others.finish()
        self._verify()
        return combine([*self._sent.sums, *self._others.sums])

    def _read(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.bytes += tensor.numel() * tensor.element_size()
            stored = self._stored(name)
            if stored is None:
                self._others.add(name, tensor, like=tensor)
            else:
                self._names.append(name)
                self._sent.add(name, tensor, like=stored)
                if self._expected is not self._sent:
                    self._expected.add(name, self.receiver.slice_of(name, tensor), like=stored)
            yield name, tensor
        self.complete = True

    def _stored(self, name: str) -> torch.Tensor | None:
        return self.receiver.stored(name) if isinstance(self.receiver, StoredWeights) else None

    def _verify(self) -> None:
        """Raise ValueError, with the name, for a parameter that is not stored as it was sent."""
        if not self._names:
            return
        self._expected.finish()
        found = TensorSums(until_finish=True)
        for name in self._names:
            if (tensor := self._stored(name)) is not None:
                found.add(name, tensor, like=tensor)
        found.finish()
        if wrong := self._expected.differing(found):
            self.receiver.release()  # so that nothing is generated with them
            raise ValueError(
                f"weights of version {self.version} were not loaded: after {type(self.receiver).__name__}.receive, "
                f"{len(wrong)} of {len(self._names)} parameters differ from what was sent, first {wrong[:3]}"
            )


def transit_fault(bytes_sent: torch.Tensor, found: torch.Tensor) -> int | None:
    """The first row whose sum differs, -1 if only a column differs, and None if the sums are equal."""
    differs = (bytes_sent != found).nonzero()
    if not len(differs):
        return None
    first = int(differs[0])
    return first if first < len(found) - COLUMNS else -1
