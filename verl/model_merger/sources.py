"""Weight sources: full tensors by name, one at a time, from safetensors folders and sharded checkpoints.

`WeightSource` is the interface. Adapters are in `lora`.
"""

import pickle
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from verl.checkpoints.safetensors_files import SafetensorsFiles, has_weights
from verl.checkpoints.shard_files import BoxLoadPlanner, Region, ShardReader
from verl.utils.paths import expanded


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


class DistributedCheckpoint(WeightSource):
    """A checkpoint of the sharded engine or of strategy=megatron, written by torch.distributed.checkpoint.

    actor/
      shards/.metadata, __0_0.distcp, ...   weights; the optimizer state is not read
      huggingface/                          config and tokenizer

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
        tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self._tensors = {key.removeprefix(_PREFIX): entry for key, entry in tensors.items() if key.startswith(_PREFIX)}

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

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        entry, key = self._tensors[name], _PREFIX + name
        full = torch.empty(entry.size, dtype=entry.properties.dtype)
        region = Region(key, (0,) * full.dim(), tuple(full.shape), tuple(entry.size))
        try:
            with warnings.catch_warnings():  # reading in a single process is intended
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                boxes = {key: [(region, full)]}
                dcp.load(boxes, storage_reader=self._reader, planner=BoxLoadPlanner(), no_dist=True)
        except CheckpointException as error:
            raise ValueError(f"{self.folder}: cannot read {key}, a file is damaged: {error}") from error
        return full
