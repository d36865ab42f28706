"""Batches by reference between the processes of one host: large columns are in memory files.

A rank writes the large columns of a result into a memory file. The controller holds the file descriptor and a
RemoteTensor per column, and uses no memory until an operator reads one. A rank that needs rows receives the descriptor
and reads them itself. A file is freed when no column refers to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl.single_controller.dispatch import Call
from verl.single_controller.local.transport import MemoryFile, Message, Parcel
from verl.single_controller.remote_batch import Packed, PackedCall, RemoteTensor, Source, large_columns, load_call


@dataclass(frozen=True)
class ColumnLocation:
    """Where a column is in a memory file. offset: in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, file: MemoryFile, rows: torch.Tensor) -> torch.Tensor:
        """Rows (n,) of the column. Consecutive rows are mapped copy-on-write instead of copied."""
        count = torch.Size(self.shape).numel()
        column = torch.frombuffer(file.map(), dtype=self.dtype, count=count, offset=self.offset).view(self.shape)
        first, n = int(rows[0]), len(rows)
        if torch.equal(rows, torch.arange(first, first + n)):
            return column[first : first + n]
        return column[rows]


class FileSource(Source):
    """The large columns of one result, in a memory file."""

    def __init__(self, file: MemoryFile):
        self.file = file
        self.columns: dict[str, ColumnLocation] = {}

    def fetch(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.columns[name].read(self.file, rows)


def result_parcel(value: Any) -> Parcel:
    """On a rank: pack a result, with its large columns in a memory file."""
    large = large_columns(value)
    if not large:
        return Parcel(value)
    tensors = [t.detach().cpu().contiguous() for t in large.values()]
    file, offsets = MemoryFile.write([memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors])
    locations = [ColumnLocation(offset, tuple(t.shape), t.dtype) for offset, t in zip(offsets, tensors)]
    references = {id(t): (name, location) for (name, t), location in zip(large.items(), locations)}
    return Parcel(value, lambda x: references.get(id(x)) if isinstance(x, torch.Tensor) else None, [file])


def load_result(message: Message) -> Any:
    """On the controller: unpack a result, with a RemoteTensor for each large column."""
    sources = [FileSource(file) for file in message.files]

    def resolve(reference: tuple[str, ColumnLocation]) -> RemoteTensor:
        (source,) = sources
        name, location = reference
        source.columns[name] = location
        return RemoteTensor.from_source(name, source, location.shape, location.dtype)

    return message.load(resolve)


def call_parcel(role: str, method: str, call: Call) -> Parcel:
    """On the controller: pack a call, with the memory files of the remote columns among its arguments."""
    packed = PackedCall((call.args, call.kwargs), FileSource)
    sources: list[FileSource] = list(dict.fromkeys(ref.source for ref in packed.refs))
    refs = [
        (sources.index(ref.source), {name: ref.source.columns[name] for name in ref.names}, ref.rows)
        for ref in packed.refs
    ]
    content = (role, method, call.padding, packed.packed, refs)
    return Parcel(content, files=[source.file for source in sources])


def unpack_call(message: Message, packed: Packed, refs: list) -> tuple[tuple, Mapping[str, Any]]:
    """On a rank: the (args, kwargs) of a call, from the last fields of a `call_parcel` and the files of its message."""
    columns = [
        {name: location.read(message.files[number], rows) for name, location in locations.items()}
        for number, locations, rows in refs
    ]
    return load_call(packed, columns)
