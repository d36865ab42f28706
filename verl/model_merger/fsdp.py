"""Rank files of FSDP checkpoints: `model_world_size_W_rank_R.pt`, one file per rank, as verl's FSDP workers write them.

actor/
  model_world_size_2_rank_0.pt   shards of rank 0: DTensor (FSDP2, FSDP1 with a device mesh), or plain tensors (a
  model_world_size_2_rank_1.pt   single rank; buffers, replicated on every rank)
  optim_..., extra_state_...     not read
  fsdp_config.json               {"FSDP_version": 2, "world_size": 2}
  huggingface/                   config and tokenizer

A rank file is a pickle. Loading it normally creates DTensors, which needs a process group and fails for files of older
torch releases. Here the pickle is read as data: objects of torch.distributed become records of their fields, tensors
are memory-mapped, and all other classes are rejected, so an untrusted file cannot run code.
"""

import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verl.model_merger.sources import Shape, TensorInfo, WeightSource, assemble
from verl.utils.paths import read_json

#: file name, offset in the full tensor, contents
LocatedShard = tuple[str, Shape, torch.Tensor]

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")

#: prefixes that wrappers insert into parameter names
_WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def is_rank_file(path: Path) -> bool:
    """Whether the file name is that of the weights of a rank."""
    return _FILE.fullmatch(path.name) is not None


def rank_files(folder: Path) -> list[Path]:
    """Return the files of ranks 0 to W-1. Raises ValueError for missing files or mixed world sizes."""
    paths = {(int(m[1]), int(m[2])): path for path in folder.iterdir() if (m := _FILE.fullmatch(path.name))}
    sizes = sorted({world for world, _ in paths})
    if len(sizes) != 1:
        raise ValueError(
            f"{folder} contains rank files of world sizes {' and '.join(map(str, sizes))}: expected one world size; "
            "move the other files away"
        )
    world = sizes[0]
    config_file = folder / "fsdp_config.json"
    if config_file.is_file() and (config := read_json(config_file))["world_size"] != world:
        raise ValueError(
            f"{config_file}: world_size {config['world_size']}, but the rank files have world size {world}"
        )
    expected = {(world, rank): f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)}
    missing = [name for key, name in expected.items() if key not in paths]
    if missing:
        raise ValueError(
            f"{folder}: missing {', '.join(missing)}; found {len(paths)} of {world} rank files. "
            "With several nodes, each may have written to its local disk: copy all files into one folder"
        )
    return [paths[key] for key in expected]


class RankFiles(WeightSource):
    """The weights in the rank files of a checkpoint, memory-mapped."""

    def __init__(self, folder: Path):
        self.files = rank_files(folder)
        shards = [read_rank_file(path) for path in self.files]
        for path, rank_shards in zip(self.files, shards):
            if rank_shards.keys() != shards[0].keys():
                differing = sorted(rank_shards.keys() ^ shards[0].keys())
                raise ValueError(
                    f"{path.name} and {self.files[0].name} contain different tensors, for example {differing[:3]}: "
                    "they are not from the same checkpoint"
                )
        # by name: the name in the files, and the name of each file with what it has of the tensor
        self._shards = {
            _WRAPPERS.sub("", name): (name, [(path.name, rank[name]) for path, rank in zip(self.files, shards)])
            for name in shards[0]
        }

    def names(self) -> list[str]:
        return list(self._shards)

    def read(self, name: str) -> torch.Tensor:
        return assemble(name, *layout_of(*self._shards[name]))


# ---- one tensor on all ranks ----------------------------------------------------------------------------------------


def layout_of(name: str, shards: list[tuple[str, "RankShard"]]) -> tuple[TensorInfo, list[LocatedShard]]:
    """The full tensor, and every shard with its offset in it.

    Args:
        name: of the tensor.
        shards: (file name, what it has of the tensor), in the order of ranks. A plain tensor is a replica.
    """
    contents = [shard for _, shard in shards]
    types = {type(shard) for shard in contents}
    if len(types) != 1:
        raise ValueError(f"{name}: expected one type on all ranks, found {sorted(t.__name__ for t in types)}")
    if torch.Tensor in types:
        shapes = {tuple(shard.shape) for shard in contents}
        if len(shapes) != 1:
            raise ValueError(f"{name}: expected replicas in the rank files, found the shapes {sorted(shapes)}")
        located = [(origin, (0,) * shard.dim(), shard) for origin, shard in shards]
        return TensorInfo(*shapes, contents[0].dtype), located
    layouts = {(shard.shape, shard.placements) for shard in contents}
    if len(layouts) != 1:
        raise ValueError(f"{name}: the rank files disagree on its shape or placements: {sorted(map(str, layouts))}")
    mesh_shape = [1 + max(axis) for axis in zip(*(shard.coordinate for shard in contents))]
    located = [(origin, _dtensor_offset(name, origin, shard, mesh_shape), shard.local) for origin, shard in shards]
    return TensorInfo(contents[0].shape, located[0][2].dtype), located


def _dtensor_offset(name: str, origin: str, shard: "DTensorShard", mesh_shape: list[int]) -> Shape:
    offset, size = [0] * len(shard.shape), list(shard.shape)
    for ranks, index, dim in zip(mesh_shape, shard.coordinate, shard.placements):
        if dim is not None:  # as torch.chunk: all chunks but the last have the same length
            length = -(-size[dim] // ranks)
            start = min(index * length, size[dim])
            offset[dim], size[dim] = offset[dim] + start, min(length, size[dim] - start)
    if tuple(size) != shard.local.shape:
        raise ValueError(f"{origin}: its shard of {name} has shape {tuple(shard.local.shape)}, expected {tuple(size)}")
    return tuple(offset)


# ---- one rank file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DTensorShard:
    """The shard of a DTensor on one rank.

    Attributes:
        coordinate: Coordinate of the rank in the device mesh.
        placements: For each mesh dimension, the tensor dimension that is sharded along it; None if replicated.
    """

    local: torch.Tensor
    shape: Shape
    coordinate: Shape
    placements: tuple[int | None, ...]


RankShard = DTensorShard | torch.Tensor


def read_rank_file(path: Path) -> dict[str, RankShard]:
    """Read the shards of one rank by tensor name.

    Raises:
        ValueError: If the file is truncated or damaged (its contents are verified against the checksums that torch.save
            stores), or contains anything other than weights.
    """
    _verify_checksums(path)
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_SAFE_PICKLE)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"cannot read weights from {path}: {error}") from error
    if not isinstance(state, dict) or not state:
        raise ValueError(f"{path} contains no weights: expected a dict of tensors, found {type(state).__name__}")
    return {name: _shard(path, name, value) for name, value in state.items()}


def _verify_checksums(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} is truncated or was not written by torch.save ({path.stat().st_size} bytes: {error}); "
            "copy it again, or use another checkpoint"
        ) from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: checksum mismatch in its entry {damaged}; use another checkpoint")


def _shard(path: Path, name: str, value: Any) -> RankShard:
    if isinstance(value, torch.Tensor):
        return value.detach()
    type_name = type(value).__name__
    if "flat_param" in name:
        raise ValueError(
            f"{path} contains flattened parameters ({name}), which cannot be split: save with "
            "StateDictType.SHARDED_STATE_DICT instead of LOCAL_STATE_DICT"
        )
    if type_name == "DTensor":
        return _dtensor(path, name, value)
    raise ValueError(f"{path}: {name}: expected a tensor or a DTensor, found {type_name}")


def _dtensor(path: Path, name: str, value: "_Record") -> DTensorShard:
    spec = value.state["_spec"].state
    (shape, *_) = spec["tensor_meta"].args
    placements: list[int | None] = []
    for placement in spec["placements"]:
        type_name = type(placement).__name__
        if type_name not in ("Shard", "Replicate"):
            raise ValueError(
                f"{path}: {name}: expected placements Shard or Replicate (FSDP, hybrid sharding), found {type_name}"
            )
        placements.append(placement.state["dim"] % len(shape) if type_name == "Shard" else None)
    coordinate = tuple(spec["mesh"].state["_coordinate_on_dim"])
    return DTensorShard(value.state["_local_tensor"], tuple(shape), coordinate, tuple(placements))


# ---- unpickling -----------------------------------------------------------------------------------------------------


class _Record:
    """An unpickled object of torch.distributed: its constructor arguments and its state."""

    args: tuple
    state: Any

    def __new__(cls, *args: Any) -> "_Record":
        record = super().__new__(cls)
        record.args, record.state = args, {}
        return record

    def __init__(self, *args: Any):
        """The arguments are stored by __new__."""

    def __setstate__(self, state: Any) -> None:
        # objects with __slots__ are pickled as (dict or None, slots)
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        self.state = state


def _rebuild_from_type(func: Callable, cls: type, args: tuple, state: Any) -> Any:
    """Replaces torch._tensor._rebuild_from_type_v2, which restores tensor subclasses."""
    if not issubclass(cls, _Record):
        return func(*args)
    record = cls(*args)
    record.__setstate__(state)
    return record


def _rebuild_wrapper(*args: Any) -> None:
    raise pickle.UnpicklingError("a tensor subclass that is not from torch.distributed")


def _attribute(owner: type, name: str) -> type:
    """Replaces getattr(class, name), by which nested classes and enum members are pickled."""
    return type(f"{owner.__name__}.{name}", (_Record,), {})


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): str,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): torch._utils._rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch._utils", "_rebuild_wrapper_subclass"): _rebuild_wrapper,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("__builtin__", "getattr"): _attribute,
    ("builtins", "getattr"): _attribute,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module.startswith("torch.distributed."):
            return type(name, (_Record,), {})
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a file of weights")


#: passed to torch.load in place of the module `pickle`
_SAFE_PICKLE = SimpleNamespace(__name__="safe_pickle", Unpickler=_Unpickler)
