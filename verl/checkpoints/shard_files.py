"""Safe reading of torch.distributed.checkpoint files: an untrusted file cannot run code.

torch describes the shards in a pickle (`.metadata`), stores values other than tensors as pickles too, and unpickles
both without restrictions. Here only the classes that torch itself writes are allowed.
"""

import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

_DESCRIPTION = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.ChunkStorageMetadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.TensorProperties,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    *(planner.SavePlan, planner.WriteItem, planner.WriteItemType),
    *(planner.TensorWriteData, planner.BytesIOWriteData),
    torch.Size,
)


_ALLOWED: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _DESCRIPTION},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # the path of the written folder, which is not used
    **{(m, name): PurePath for m in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    **{("torch", str(t).removeprefix("torch.")): t for t in vars(torch).values() if isinstance(t, torch.dtype)},
}


def unpickling_fault(error: BaseException) -> str:
    """An error of `torch.load` in one line, without the advice to load the file without restrictions."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        reason = re.search(r"(Unsupported|Trying to load) .*", text)
        text = reason[0].partition(". Please")[0] if reason else ""
    line = text.partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in the metadata of a sharded checkpoint")
        return _ALLOWED[module, name]


class ShardReader(FileSystemReader):
    """Reads the files of a folder, the metadata once. Raises UnpicklingError if these contain classes other than those
    of torch."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._folder = Path(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is not None:
            return self._metadata
        with (self._folder / ".metadata").open("rb") as file:
            described = _Unpickler(file).load()
        if described.storage_meta is None:
            described.storage_meta = StorageMeta()
        described.storage_meta.load_id = self.load_id
        self._metadata = described
        return described


class ShardPlanner(DefaultLoadPlanner):
    """Loads values into a state. Raises pickle.UnpicklingError for values other than plain ones."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # raises for anything that could run code; torch then reads it again without this check
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


# ---- tensors of which a rank has boxes ------------------------------------------------------------------------------

# A state maps a key to (box, values) of the rank. Ranks may have the same box; one of them writes it. The files do not
# depend on the parallel sizes: any layout reads the boxes that it needs.


@dataclass(frozen=True)
class Region:
    """A box of a tensor: `offset` and `shape`, of a full tensor of `full`."""

    source: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    full: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape))


Boxes = dict[str, list[tuple[Region, torch.Tensor]]]


def _chunk(region: Region) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(region.offset), torch.Size(region.shape))


class BoxSavePlanner(dcp.DefaultSavePlanner):
    """Writes the boxes of a state."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        self._values: dict[MetadataIndex, torch.Tensor] = {}
        for key, boxes in self.state_dict.items():
            for region, values in boxes:
                if not values.numel():
                    continue
                chunk = _chunk(region)
                index = MetadataIndex(key, chunk.offsets)
                described = TensorWriteData(chunk, TensorProperties.create_from_tensor(values), torch.Size(region.full))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=described))
                self._values[index] = values
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._values[MetadataIndex(index.fqn, index.offset)]


class BoxLoadPlanner(ShardPlanner):
    """Reads the boxes of a state in place. Raises ValueError for a key that is missing or has another shape."""

    def set_up_planner(self, state_dict: Boxes, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        self._values: dict[MetadataIndex, torch.Tensor] = {}
        for key, boxes in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(key)
            nonempty = [(region, values) for region, values in boxes if values.numel()]
            for region, values in nonempty:
                if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != region.full:
                    actual = list(stored.size) if isinstance(stored, TensorStorageMetadata) else "nothing"
                    raise ValueError(f"{key}: expected the shape {list(region.full)}, found {actual}")
                self._values[MetadataIndex(key, torch.Size(region.offset))] = values
            items += create_read_items_for_chunk_list(key, stored, [_chunk(region) for region, _ in nonempty])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._values[MetadataIndex(index.fqn, index.offset)]
