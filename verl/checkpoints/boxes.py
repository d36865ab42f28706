"""Sharded files (torch.distributed.checkpoint) of tensors of which a rank has boxes.

A state maps a key to (box, values) of the rank. Ranks may have the same box; one of them writes it. The files do not
depend on the parallel sizes: any layout reads the boxes that it needs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from verl.checkpoints.shard_files import ShardPlanner


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
