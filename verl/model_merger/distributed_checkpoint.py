"""Checkpoints of this project's sharded engine: `shards/`, written by torch.distributed.checkpoint.

actor/
  shards/.metadata, __0_0.distcp, ...   weights, and the optimizer's state, which is not read
  huggingface/                          config and tokenizer
"""

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from verl.checkpoints.shard_files import ShardReader
from verl.model_merger.source import Shape, TensorInfo, WeightSource, join

#: of every weight: the engine saves {"model": ...} of a module that holds the HuggingFace model as `module`
_PREFIX = "model.module."


class _Reader(ShardReader):
    """Reads the description of the checkpoint once, and not again for every tensor."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._described: Metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._described


class DistributedCheckpoint(WeightSource):
    """The folder `shards/`."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._reader = _Reader(folder)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{folder} is not a whole checkpoint: its file .metadata, written last, cannot be read ({error})"
            ) from error
        described = self._reader.read_metadata()
        self._check_files(described)
        self._tensors: dict[str, TensorStorageMetadata] = {
            key.removeprefix(_PREFIX): entry
            for key, entry in described.state_dict_metadata.items()
            if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }

    def _check_files(self, described: Metadata) -> None:
        ends: dict[str, int] = {}
        for entry in described.storage_data.values():
            ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
        missing = [name for name in sorted(ends) if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder} lacks {', '.join(missing)}: {len(ends) - len(missing)} of {len(ends)} files are here. "
                "With several nodes each may have written to its own disk: copy all files into one folder"
            )
        for name, end in ends.items():
            size = (self.folder / name).stat().st_size
            if size < end:
                raise ValueError(f"{self.folder / name} is torn: it has {size} bytes, at least {end} were written")

    def names(self) -> list[str]:
        return list(self._tensors)

    def infos(self, expected: Mapping[str, Shape]) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(entry.size), entry.properties.dtype) for name, entry in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        entry = self._tensors[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with warnings.catch_warnings():  # that this is one process alone is meant
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({_PREFIX + name: whole}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            raise ValueError(f"{self.folder}: {name} cannot be read, a file is damaged: {error}") from error
        return whole

    def read_again(self, name: str) -> torch.Tensor:
        """The chunks as they lie in the files, joined in the order of their offsets."""
        places = self._reader.read_metadata().storage_data
        blocks = []
        for chunk in self._tensors[name].chunks:
            place = places[MetadataIndex(_PREFIX + name, chunk.offsets)]
            with (self.folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                content = io.BytesIO(file.read(place.length))
            blocks.append((tuple(chunk.offsets), torch.load(content, map_location="cpu", weights_only=True)))
        return join([block for block in blocks if block[1].numel()] or blocks)
