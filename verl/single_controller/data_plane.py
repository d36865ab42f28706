"""Batches by reference: what leaves a rank, what stays there, and how other ranks get their rows.

A rank's `Shelf` keeps the large columns of the batches that it made. `unpack_result` gives the controller that batch
with a RemoteTensor for each of them. `PackedCall` turns arguments with such columns into one pickle and a list of
`Take`s: which rows of which shelf go along. The rank that is called puts them together in `Shelf.load_call`, from what
was sent to it and from what it has itself. How the pieces move is the caller's affair.
"""

import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.single_controller.remote_tensor import Held, RemoteTensor, Source, assemble
from verl.single_controller.transport import TensorPickler

KEEP_BYTES = 1 << 16  # a column of more bytes than this stays with the rank that made it

Packed = tuple[bytes, list[np.ndarray]]  # a pickle, and the memory of its tensors and arrays


class _Pickler(TensorPickler):
    """`stand_in(value)` gives what is sent in the place of a value, or None: then the value itself is sent."""

    def __init__(self, stream: BytesIO, buffers: list, stand_in: Callable[[Any], Any]):
        self._stand_in = stand_in
        super().__init__(stream, buffers)

    def persistent_id(self, value: Any) -> Any:
        return self._stand_in(value)


class _Unpickler(pickle.Unpickler):
    """`original(stand_in)` gives the value in the place of which a stand-in was sent."""

    def __init__(self, packed: Packed, original: Callable[[Any], Any]):
        self._original = original
        head, buffers = packed
        # received memory may be shared with other processes and read-only: whoever gets it may write, so copy
        super().__init__(BytesIO(head), buffers=[bytearray(b) for b in buffers])

    def persistent_load(self, stand_in: Any) -> Any:
        return self._original(stand_in)


def _pack(value: Any, stand_in: Callable[[Any], Any] = lambda value: None) -> Packed:
    stream, buffers = BytesIO(), []
    _Pickler(stream, buffers, stand_in).dump(value)
    return stream.getvalue(), [np.frombuffer(b.raw(), dtype=np.uint8) for b in buffers]


def unpack(packed: Packed) -> Any:
    """The value of a pack that holds no references."""
    return _Unpickler(packed, lambda reference: None).load()


def nbytes(packed: Packed) -> int:
    return len(packed[0]) + sum(b.nbytes for b in packed[1])


def unpack_result(packed: Packed, source_of: Callable[[int], Source]) -> Any:
    """A rank's result on the controller. source_of(key): the Source that stands for one batch on the rank's shelf."""
    return _Unpickler(packed, lambda kept: RemoteTensor.whole(kept[1], source_of(kept[0]), *kept[2:])).load()


@dataclass
class Take:
    """Rows of one source that a call needs, of the columns `names`."""

    source: Source
    rows: torch.Tensor
    names: list[str] = field(default_factory=list)


class PackedCall:
    """The arguments of a call, packed once for all ranks that get them, and what must be taken from shelves."""

    def __init__(self, value: Any):
        self._takes: dict[tuple[int, bytes], Take] = {}
        self.packed = _pack(value, self._stand_in)

    @property
    def takes(self) -> list[Take]:
        return list(self._takes.values())

    def _stand_in(self, value: Any) -> Any:
        """How the receiver makes a remote column again: shape, dtype, and where each of its parts comes from."""
        if not (isinstance(value, RemoteTensor) and value.is_remote):
            return None
        parts = []
        for source, positions, rows in value.parts():
            if isinstance(source, Held):
                parts.append((positions, None, source.fetch(value.name, rows)))
            else:
                parts.append((positions, self._number(source, rows, value.name), value.name))
        return tuple(value.shape), value.dtype, parts

    def _number(self, source: Source, rows: torch.Tensor, name: str) -> int:
        key = (id(source), rows.numpy().tobytes())
        take = self._takes.setdefault(key, Take(source, rows))
        if name not in take.names:
            take.names.append(name)
        return list(self._takes).index(key)


class Shelf:
    """The large columns of the batches that one rank made, until the controller drops them."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._keys = itertools.count()

    def pack_result(self, value: Any) -> Packed:
        """What is sent of a result: all but the large columns of a DataProto. These are copied, so that nothing that
        the worker does to its own tensors later changes what others read."""
        if not isinstance(value, DataProto):
            return _pack(value)
        large = {k: t for k, t in value.tensors.items() if t.numel() * t.element_size() > KEEP_BYTES}
        if not large:
            return _pack(value)
        key = next(self._keys)
        self._kept[key] = {k: t.detach().to("cpu", copy=True).contiguous() for k, t in large.items()}
        references = {id(t): (key, k, tuple(t.shape), t.dtype) for k, t in large.items()}
        return _pack(value, lambda part: references.get(id(part)) if isinstance(part, torch.Tensor) else None)

    def take(self, key: int, names: Iterable[str], rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Some rows of some columns of one batch."""
        kept = self._kept[key]
        return {name: kept[name][rows] for name in names}

    def pack_rows(self, key: int, names: Iterable[str], rows: torch.Tensor) -> Packed:
        """The same, to be sent."""
        return _pack(self.take(key, names, rows))

    def drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            del self._kept[key]

    def load_call(self, packed: Packed, taken: Sequence[Mapping[str, torch.Tensor]]) -> Any:
        """The arguments of a call. taken: the rows of each Take of the PackedCall, in its order."""

        def original(stand_in: tuple) -> torch.Tensor:
            shape, dtype, parts = stand_in
            pieces = [(at, taken[number][what] if number is not None else what) for at, number, what in parts]
            return assemble(shape, pieces) if pieces else torch.empty(shape, dtype=dtype)

        return _Unpickler(packed, original).load()
