"""Weight sources: full tensors by name, one at a time, from safetensors folders and sharded checkpoints.

`WeightSource` is the interface. Rank files (`model_world_size_W_rank_R.pt`) are in `fsdp`, adapters in `lora`.
"""

import pickle
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from verl.checkpoints.safetensors_files import SafetensorsFiles, has_weights
from verl.checkpoints.shard_files import BoxLoadPlanner, Region, ShardReader
from verl.utils.paths import expanded

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a full tensor."""

    shape: Shape
    dtype: torch.dtype


class WeightSource(ABC):
    """The weights of a model, independent of how they are stored.

    Tensors are read on demand, so memory use is that of the tensors in use, not of the model.
    """

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors, parameters and buffers."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Read a full tensor. Raises ValueError that names the tensor and the file if it cannot be read."""


def main_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The floating-point dtype of most values."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0]


# ---- shards of one tensor -------------------------------------------------------------------------------------------


def assemble(name: str, info: TensorInfo, shards: Iterable[tuple[str, Shape, torch.Tensor]]) -> torch.Tensor:
    """Copy the shards of a tensor into one tensor.

    Args:
        shards: (file name, offset in the full tensor, contents). Shards with the same offset are replicas, as in
            hybrid sharding, and must be bitwise equal.

    Raises:
        ValueError: If replicas differ, or the shards do not fill the tensor.
    """
    full = torch.empty(info.shape, dtype=info.dtype)
    filled: dict[Shape, str] = {}
    count = 0
    for origin, offset, shard in shards:
        if shard.numel() == 0:  # fewer rows than ranks: the last ranks are empty
            continue
        region = full[tuple(slice(start, start + size) for start, size in zip(offset, shard.shape))]
        if region.shape != shard.shape:
            raise ValueError(f"{origin}: its shard of {name} at {offset} exceeds the shape {info.shape}")
        if offset not in filled:
            filled[offset] = origin
            count += shard.numel()
            region.copy_(shard)
        elif not same_bits(region, shard):
            raise ValueError(
                f"{name} differs between {filled[offset]} and {origin}, which should hold replicas: "
                "they are not from the same step, or one of them is damaged"
            )
    if count != full.numel():
        raise ValueError(f"{name}: the shards have {count} elements, expected {full.numel()} ({info.shape})")
    return full


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are bitwise equal (NaN equals itself)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


# ---- safetensors ----------------------------------------------------------------------------------------------------


def local_folder(name: str) -> Path | None:
    """Return the local folder of a safetensors model: a path, or in the HuggingFace cache. Downloads nothing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = expanded(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):  # not in the cache, or not a valid repository id
            return None
    return folder if has_weights(folder) else None


class SafetensorsFolder(SafetensorsFiles, WeightSource):
    """A HuggingFace folder.

    Written by single-device training, and the format of base models and merged models.
    """


# ---- torch.distributed.checkpoint -----------------------------------------------------------------------------------

#: prefix of every weight: the engine saves {"model": ...} of a module that holds the HuggingFace model as `module`
_PREFIX = "model.module."


class ShardFiles:
    """The tensors in a folder of torch.distributed.checkpoint.

    Attributes:
        tensors: key -> shape, dtype and chunks.

    Raises:
        ValueError: a file is missing or truncated.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._reader = ShardReader(folder)
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{folder} is not a complete checkpoint: cannot read .metadata, which is written last ({error})"
            ) from error
        self._check_files(metadata)
        entries = metadata.state_dict_metadata.items()
        self.tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def _check_files(self, metadata: Metadata) -> None:
        ends: dict[str, int] = {}
        for entry in metadata.storage_data.values():
            ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
        missing = [name for name in sorted(ends) if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder}: missing {', '.join(missing)}; found {len(ends) - len(missing)} of {len(ends)} files. "
                "With several nodes, each may have written to its local disk: copy all files into one folder"
            )
        for name, end in ends.items():
            size = (self.folder / name).stat().st_size
            if size < end:
                raise ValueError(f"{self.folder / name} is truncated: expected at least {end} bytes, found {size}")

    def read(self, key: str, index: Shape = ()) -> torch.Tensor:
        """Read a tensor, or its slice at `index` of the first dimensions. Raises ValueError for a damaged file."""
        entry, depth = self.tensors[key], len(index)
        full = torch.empty(entry.size[depth:], dtype=entry.properties.dtype)
        region = Region(key, (*index, *[0] * full.dim()), (*[1] * depth, *full.shape), tuple(entry.size))
        try:
            with warnings.catch_warnings():  # reading in a single process is intended
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                boxes = {key: [(region, full.view(region.shape))]}
                dcp.load(boxes, storage_reader=self._reader, planner=BoxLoadPlanner(), no_dist=True)
        except CheckpointException as error:
            raise ValueError(f"{self.folder}: cannot read {key}, a file is damaged: {error}") from error
        return full


class DistributedCheckpoint(WeightSource):
    """A checkpoint of the sharded engine or of strategy=megatron, written by torch.distributed.checkpoint.

    actor/
      shards/.metadata, __0_0.distcp, ...   weights; the optimizer state is not read
      huggingface/                          config and tokenizer
    """

    def __init__(self, folder: Path):
        """Open the folder `shards/`. Raises ValueError if a file is missing or truncated."""
        self._files = ShardFiles(folder)
        stored = self._files.tensors.items()
        self._tensors = {key.removeprefix(_PREFIX): entry for key, entry in stored if key.startswith(_PREFIX)}

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        return self._files.read(_PREFIX + name)
