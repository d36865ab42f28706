"""Safe reading of torch.distributed.checkpoint files: an untrusted file cannot run code.

torch describes the shards in a pickle (`.metadata`), stores values other than tensors as pickles too, and unpickles
both without restrictions. Here only the classes that torch itself writes are allowed.
"""

import io
import pickle
import re
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

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


class _MegatronMetadata(metadata.Metadata):
    """The class that megatron-core before 0.16 wrote for torch's; its further fields describe optimizer state."""


class _MegatronPlan(planner.SavePlan):
    """The class of plans that megatron-core adds to the metadata."""


_ALLOWED: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _DESCRIPTION},
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): _MegatronMetadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _MegatronPlan,
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
    """Reads the files of a folder, the metadata once.

    Raises:
        pickle.UnpicklingError: the metadata contain classes other than those of torch.
    """

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
