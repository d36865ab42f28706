"""Reading the weights of one rank, `model_world_size_W_rank_R.pt`, in a process that is no rank.

Such a file is a pickle of DTensors or ShardedTensors. torch would build these objects with the classes of the installed
release, which need a process group or stumble over files of an older release. Here the pickle is read as data: objects
of torch.distributed become records of their fields, tensors stay on the disk until they are used (memory mapping), and
everything else is refused, so that a file from elsewhere cannot run code.
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verl.model_merger.source import Shape


@dataclass(frozen=True)
class DTensorPiece:
    """One rank's share of a DTensor.

    local: the share. shape: of the whole. coordinate: the rank's place in the device mesh. placements: for each
    dimension of the mesh, the dimension of the tensor that is cut along it, or None where the ranks hold copies.
    """

    local: torch.Tensor
    shape: Shape
    coordinate: Shape
    placements: tuple[int | None, ...]


@dataclass(frozen=True)
class ShardedTensorPiece:
    """One rank's share of a ShardedTensor (FSDP1 without a device mesh). blocks: (offset in the whole, contents)."""

    shape: Shape
    blocks: tuple[tuple[Shape, torch.Tensor], ...]


Piece = DTensorPiece | ShardedTensorPiece | torch.Tensor


def read_rank_file(path: Path) -> dict[str, Piece]:
    """Name -> what this rank holds of the tensor.

    Raises ValueError that names the file when it is torn or damaged (every byte is read and compared with the checksums
    that torch.save stored), or when it holds something else than weights.
    """
    _check_whole(path)
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_SAFE_PICKLE)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from error
    if not isinstance(state, dict) or not state:
        raise ValueError(f"{path} holds no weights: expected names and tensors, found {type(state).__name__}")
    return {name: _piece(path, name, value) for name, value in state.items()}


def _check_whole(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} is torn or no file of torch.save ({path.stat().st_size} bytes: {error}); "
            "copy it again, or use another checkpoint"
        ) from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: the checksum of its entry {damaged} is wrong; use another checkpoint")


def _piece(path: Path, name: str, value: Any) -> Piece:
    if isinstance(value, torch.Tensor):
        return value.detach()
    kind = type(value).__name__
    if "flat_param" in name:
        raise ValueError(
            f"{path} holds flattened parameters ({name}), which do not say what they are made of: save with "
            "StateDictType.SHARDED_STATE_DICT, not LOCAL_STATE_DICT"
        )
    if kind == "DTensor":
        return _dtensor(path, name, value)
    if kind == "ShardedTensor":
        local_shards, metadata = value.state[:2]
        blocks = ((tuple(s.state["metadata"].state["shard_offsets"]), s.state["tensor"]) for s in local_shards)
        return ShardedTensorPiece(tuple(metadata.state["size"]), tuple(blocks))
    raise ValueError(f"{path}: {name} is a {kind}: expected a tensor, a DTensor or a ShardedTensor")


def _dtensor(path: Path, name: str, value: "_Record") -> DTensorPiece:
    spec = value.state["_spec"].state
    (shape, *_) = spec["tensor_meta"].args
    placements: list[int | None] = []
    for placement in spec["placements"]:
        kind = type(placement).__name__
        if kind not in ("Shard", "Replicate"):
            raise ValueError(
                f"{path}: {name} is placed by {kind}: expected Shard or Replicate, as FSDP and hybrid sharding place it"
            )
        placements.append(placement.state["dim"] % len(shape) if kind == "Shard" else None)
    coordinate = tuple(spec["mesh"].state["_coordinate_on_dim"])
    return DTensorPiece(value.state["_local_tensor"], tuple(shape), coordinate, tuple(placements))


# ---- the pickle -----------------------------------------------------------------------------------------------------


class _Record:
    """An object of torch.distributed as its pickle describes it: constructor arguments and state."""

    args: tuple
    state: Any

    def __new__(cls, *args: Any) -> "_Record":
        record = super().__new__(cls)
        record.args, record.state = args, {}
        return record

    def __init__(self, *args: Any):
        """Nothing more: __new__ has kept the arguments."""

    def __setstate__(self, state: Any) -> None:
        # objects with __slots__ are pickled as (dict or None, slots)
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        self.state = state


def _rebuild_from_type(func: Callable, kind: type, args: tuple, state: Any) -> Any:
    """What torch pickles a tensor subclass by."""
    if not issubclass(kind, _Record):
        return func(*args)
    record = kind(*args)
    record.__setstate__(state)
    return record


def _rebuild_wrapper(*args: Any) -> None:
    raise pickle.UnpicklingError("a tensor subclass outside torch.distributed")


def _attribute(owner: type, name: str) -> type:
    """Classes within classes, and members of enumerations, are pickled as getattr(class, name)."""
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
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place among weights")


#: what torch.load takes instead of the module `pickle`
_SAFE_PICKLE = SimpleNamespace(__name__="safe_pickle", Unpickler=_Unpickler)
