"""Batches by reference: what leaves a rank, what stays there, and how other ranks get their rows.

A rank's `Shelf` keeps the large columns of the batches that it made. `unpack_result` gives the controller that batch
with a RemoteTensor for each of them. `PackedCall` turns arguments with such columns into one pickle and a list of
`Take`s: which rows of which shelf go along. The rank that is called puts them together in `load_call`, from what was
sent to it and from what it has itself. How the pieces move is the caller's affair: between the processes of one host
`column_files` takes the place of shelves.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.single_controller import pickling
from verl.single_controller.pickling import pack
from verl.single_controller.remote_tensor import Held, RemoteTensor, Source, assemble

KEEP_BYTES = 1 << 16  # a column of more bytes than this stays with the rank that made it

Packed = tuple[bytes, list[np.ndarray]]  # a pickle, and the memory of its tensors and arrays


def _packed(value: Any, stand_in: Callable[[Any], Any] = lambda value: None) -> Packed:
    head, buffers = pack(value, stand_in)
    return head, [np.frombuffer(b, dtype=np.uint8) for b in buffers]


def unpack(packed: Packed, original: Callable[[Any], Any] = lambda reference: None) -> Any:
    """The value of a pack. original: reference -> what it stands for, in a pack that holds references."""
    head, buffers = packed
    # received memory may be shared with other processes and read-only: whoever gets it may write, so copy
    return pickling.unpack(head, [b if b.flags.writeable else bytearray(b) for b in buffers], original)


def nbytes(packed: Packed) -> int:
    return len(packed[0]) + sum(b.nbytes for b in packed[1])


def unpack_result(packed: Packed, source_of: Callable[[int], Source]) -> Any:
    """A rank's result on the controller. source_of(key): the Source that stands for one batch on the rank's shelf."""
    return unpack(packed, lambda kept: RemoteTensor.whole(kept[1], source_of(kept[0]), *kept[2:]))


def large_columns(value: Any) -> dict[str, torch.Tensor]:
    """The columns of a batch that stay with the rank that made them."""
    if not isinstance(value, DataProto):
        return {}
    return {name: t for name, t in value.tensors.items() if t.numel() * t.element_size() > KEEP_BYTES}


@dataclass
class Take:
    """Rows of one source that a call needs, of the columns `names`."""

    source: Source
    rows: torch.Tensor
    names: list[str] = field(default_factory=list)


class PackedCall:
    """The arguments of a call, packed once for all ranks that get them, and what must be taken from elsewhere.

    readable: the Sources that the ranks can read; columns of others are fetched and sent.
    """

    def __init__(self, value: Any, readable: type[Source] = Source):
        self._readable = (Held, readable)
        self._takes: dict[tuple[int, bytes], Take] = {}
        self.packed = _packed(value, self._stand_in)

    @property
    def takes(self) -> list[Take]:
        return list(self._takes.values())

    def _stand_in(self, value: Any) -> Any:
        """How the receiver makes a remote column again: shape, dtype, and where each of its parts comes from."""
        if not (isinstance(value, RemoteTensor) and value.is_remote):
            return None
        found = list(value.parts())
        if not all(isinstance(source, self._readable) for source, _, _ in found):
            return None
        parts = []
        for source, positions, rows in found:
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
        """What is sent of a result: all but its large columns. These are copied, so that nothing that the worker does
        to its own tensors later changes what others read."""
        large = large_columns(value)
        if not large:
            return _packed(value)
        key = next(self._keys)
        self._kept[key] = {k: t.detach().to("cpu", copy=True).contiguous() for k, t in large.items()}
        references = {id(t): (key, k, tuple(t.shape), t.dtype) for k, t in large.items()}
        return _packed(value, lambda part: references.get(id(part)) if isinstance(part, torch.Tensor) else None)

    def take(self, key: int, names: Iterable[str], rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Some rows of some columns of one batch."""
        kept = self._kept[key]
        return {name: kept[name][rows] for name in names}

    def pack_rows(self, key: int, names: Iterable[str], rows: torch.Tensor) -> Packed:
        """The same, to be sent."""
        return _packed(self.take(key, names, rows))

    def drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            del self._kept[key]


def load_call(packed: Packed, taken: Sequence[Mapping[str, torch.Tensor]]) -> Any:
    """The arguments of a call. taken: the rows of each Take of the PackedCall, in its order."""

    def original(stand_in: tuple) -> torch.Tensor:
        shape, dtype, parts = stand_in
        pieces = [(at, taken[number][what] if number is not None else what) for at, number, what in parts]
        return assemble(shape, pieces) if pieces else torch.empty(shape, dtype=dtype)

    return unpack(packed, original)
