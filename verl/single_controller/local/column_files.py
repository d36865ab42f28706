"""Batches by reference between the processes of one host: large columns lie in memory files.

A rank writes the large columns of a result into a memory file once. The controller holds the file's descriptor and a
RemoteTensor for each column, which costs it no memory until an operator reads one; a rank that needs rows gets the
descriptor and reads them itself. A file is gone when no column refers to it any more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl.single_controller.data_plane import Packed, PackedCall, large_columns, load_call
from verl.single_controller.dispatch import Call
from verl.single_controller.local.transport import MemoryFile, Message, Parcel
from verl.single_controller.remote_tensor import RemoteTensor, Source


@dataclass(frozen=True)
class Column:
    """Where a column lies in a memory file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, file: MemoryFile, rows: torch.Tensor) -> torch.Tensor:
        """Some rows (n,). Rows that follow one another are not copied before somebody writes into them."""
        count = torch.Size(self.shape).numel()
        whole = torch.frombuffer(file.map(), dtype=self.dtype, count=count, offset=self.offset).view(self.shape)
        first, n = int(rows[0]), len(rows)
        if torch.equal(rows, torch.arange(first, first + n)):
            return whole[first : first + n]
        return whole[rows]


class FileSource(Source):
    """The columns of one result, in a memory file."""

    def __init__(self, file: MemoryFile):
        self.file = file
        self.columns: dict[str, Column] = {}

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.columns[name].read(self.file, rows)


def result_parcel(value: Any) -> Parcel:
    """What a rank sends of a result: all but its large columns, and the file with these."""
    large = large_columns(value)
    if not large:
        return Parcel(value)
    tensors = [t.detach().cpu().contiguous() for t in large.values()]
    file, offsets, _ = MemoryFile.of([memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors])
    places = [Column(offset, tuple(t.shape), t.dtype) for offset, t in zip(offsets, tensors)]
    references = {id(t): (name, place) for (name, t), place in zip(large.items(), places)}
    return Parcel(value, lambda part: references.get(id(part)) if isinstance(part, torch.Tensor) else None, [file])


def load_result(message: Message) -> Any:
    """A rank's result on the controller, with a RemoteTensor for each large column."""
    sources = [FileSource(file) for file in message.files]

    def original(reference: tuple[str, Column]) -> RemoteTensor:
        (source,) = sources
        name, column = reference
        source.columns[name] = column
        return RemoteTensor.whole(name, source, column.shape, column.dtype)

    return message.load(original)


def call_parcel(role: str, method: str, call: Call) -> Parcel:
    """What a rank is sent of a call: its arguments, and the files with the columns among them."""
    packed = PackedCall((call.args, call.kwargs), FileSource)
    sources: list[FileSource] = list(dict.fromkeys(take.source for take in packed.takes))
    takes = [
        (sources.index(take.source), {name: take.source.columns[name] for name in take.names}, take.rows)
        for take in packed.takes
    ]
    content = (role, method, call.padding, packed.packed, takes)
    return Parcel(content, files=[source.file for source in sources])


def unpack_call(message: Message, packed: Packed, takes: list) -> tuple[tuple, Mapping[str, Any]]:
    """(args, kwargs) of a call on the rank that is called, from what `message` says of them."""
    taken = [
        {name: column.read(message.files[number], rows) for name, column in columns.items()}
        for number, columns, rows in takes
    ]
    return load_call(packed, taken)
