"""DataProto: the batch that passes through a flow, between workers and to disk.

`DataProto` is all that most code needs. The functions have the names of public verl's module.
"""

import os
import pickle
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from verl.batch.containers import (
    MERGED_ENTRIES,
    Containers,
    DataProtoConfig,
    concat_meta_info,
    deserialize_single_tensor,
    deserialize_tensordict,
    numpy_dict_to_tensor_dict,
    serialize_single_tensor,
    serialize_tensordict,
    type_info,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.batch.rows import DataProtoItem, Rows
from verl.columns import DataProtoValidationError

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

__all__ = [
    "MERGED_ENTRIES",
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "numpy_dict_to_tensor_dict",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]


class DataProto(Rows, Containers):
    """A batch of B rows.

    It has three containers: `batch` (a TensorDict: tensor columns with the same first dimension; None without any),
    `non_tensor_batch` (columns of Python objects, one per row) and `meta_info` (metadata of the whole batch).

        batch = DataProto.from_dict({"responses": ids}, {"uid": ["a", "b"]}, {"temperature": 1.0})
        batch.union(DataProto.from_dict({"advantages": advantages}))
        mini_batches = batch.split(32)
        batch[0].batch["responses"]  # one row: a tensor of shape (T,)

    `union`, `rename`, `reorder`, `pop`, `padding` and `to` change the batch in place. Every other operation returns a
    new DataProto with new containers: a column or entry set in one batch never appears in another; call `copy` before
    an in-place operation if the old batch is still needed. The columns are shared where nothing has to be computed
    (`select`, `union`, slices), like views in torch: set a new column instead of writing into an existing one.

    Args:
        batch: tensor columns, each of shape (B, ...); a TensorDict or any mapping.
        non_tensor_batch: object columns, each an array of B rows, or a list or tuple of B entries, stored as a (B,)
            array of objects.
        meta_info: metadata of the whole batch (temperature, metrics, ...); not split with the rows.

    Raises:
        DataProtoValidationError: if the numbers of rows differ, a name is used twice, or a column is neither a tensor
            nor a sequence.
    """

    # ---- joining rows ----------------------------------------------------------------------------------------------

    @classmethod
    def concat(cls, data: Sequence[Self]) -> Self:
        """Concatenate the rows of several batches.

        Columns must agree in names, dtypes and row shapes. Metadata that several batches have must be equal. Only
        `metrics` and `timing` may differ; they become a dict of the lists of all values, for the caller to reduce.
        """
        if not data:
            raise DataProtoValidationError("concat: expected at least one batch, found none")
        tensors, objects = [batch.tensors for batch in data], [batch.non_tensor_batch for batch in data]
        for i in range(1, len(data)):
            odd = (tensors[0].keys() ^ tensors[i].keys()) | (objects[0].keys() ^ objects[i].keys())
            if odd:
                raise DataProtoValidationError(f"concat: batch {i} and batch 0 differ in the columns {sorted(odd)}")
        for name, column in tensors[0].items():
            for i, others in enumerate(tensors):
                if others[name].shape[1:] != column.shape[1:] or others[name].dtype != column.dtype:
                    raise DataProtoValidationError(
                        f"concat: column {name!r} has rows {tuple(column.shape[1:])} of {column.dtype} in batch 0 and "
                        f"{tuple(others[name].shape[1:])} of {others[name].dtype} in batch {i}; pad or convert first"
                    )
        return data[0]._build(
            sum(len(batch) for batch in data),
            {k: torch.cat([columns[k] for columns in tensors]) for k in tensors[0]},
            {k: np.concatenate([columns[k] for columns in objects]) for k in objects[0]},
            concat_meta_info([batch.meta_info for batch in data]),
        )

    # ---- TensorDict -------------------------------------------------------------------------------------------------

    @classmethod
    def from_tensordict(
        cls, tensor_dict: "TensorDictBase", meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Make a batch from a TensorDict: stacks of non-tensors are object columns, single non-tensors are metadata."""
        from tensordict import NonTensorData, NonTensorStack

        tensors, objects, info = {}, {}, dict(meta_info or {})
        for name in tuple(tensor_dict.keys()):
            value = tensor_dict.get(name)
            if isinstance(value, NonTensorData):
                info[name] = value.data
            elif isinstance(value, NonTensorStack):
                objects[name] = value.tolist()
            else:
                tensors[name] = value
        return cls.from_dict(tensors, objects, info, num_batch_dims)

    def to_tensordict(self) -> "TensorDict":
        """Return a TensorDict: the tensors, the object columns (NonTensorStack) and the metadata (NonTensorData)."""
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        if twice := [name for name in self.meta_info if name in self]:
            raise DataProtoValidationError(f"{twice} are both columns and entries of meta_info: rename one of them")
        objects = {
            name: NonTensorStack.from_list([NonTensorData(entry) for entry in column])
            for name, column in self.non_tensor_batch.items()
        }
        info = {name: NonTensorData(value, batch_size=[len(self)]) for name, value in self.meta_info.items()}
        return TensorDict({**self.tensors, **objects, **info}, batch_size=[len(self)])

    # ---- text -------------------------------------------------------------------------------------------------------

    def print_size(self, prefix: str = "") -> None:
        """Print the memory of the tensor columns and of the references to objects, in GB."""
        objects = sum(column.nbytes for column in self.non_tensor_batch.values())
        print(
            f"{prefix}{', ' if prefix else ''}Size of tensordict: {self.nbytes() / 1024**3} GB, size of "
            f"non_tensor_batch: {objects / 1024**3} GB"
        )

    def get_data_info(self) -> str:
        """Return one line per column and meta_info entry: shape, dtype and device, or type."""
        lines = ["batch"]
        lines += [f"  {name}: {tuple(v.shape)} ({v.dtype}) {v.device}" for name, v in self.tensors.items()]
        lines += ["non_tensor_batch"]
        lines += [f"  {name}: ndarray{v.shape} ({v.dtype})" for name, v in self.non_tensor_batch.items()]
        return "\n".join([*lines, "meta_info", *(f"  {k}: {type_info(v)}" for k, v in self.meta_info.items())])

    # ---- devices, files ---------------------------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> Self:
        """Move the tensors of this batch to `device`, in place, and return it. It is then `batch.device`, too."""
        tensors = {k: v.to(device) for k, v in self.tensors.items()}
        moved = self._become(self._build(len(self), tensors, self.non_tensor_batch, self.meta_info))
        moved._device = torch.device(device)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, which is also the file format. A view is pickled without the rest of its base tensor."""
        tensors = {k: _own_storage(v.detach()) for k, v in self.tensors.items()}
        return {
            "rows": len(self),
            "tensors": None if self.batch is None else tensors,
            "objects": self.non_tensor_batch,
            "facts": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(vars(self._from_state(state)))

    @classmethod
    def _from_state(cls, state: dict[str, Any]) -> Self:
        built = cls()._build(state["rows"], state["tensors"] or {}, state["objects"], state["facts"])
        built._is_emptied = state["tensors"] is not None
        return built

    def save(self, path: str | Path) -> None:
        """Write to a file, atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("wb") as out:
                torch.save(self.copy().to("cpu").__getstate__(), out)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`, onto the CPU. It contains pickled objects: only load files that you trust.

        Raises:
            DataProtoValidationError: if the file has another format, or is truncated or damaged.
        """
        invalid = DataProtoValidationError(
            f"{path}: expected a batch written by DataProto.save, found a different or damaged file"
        )
        with Path(path).open("rb") as file:
            # torch.load does not verify the checksums of the archive
            if not zipfile.is_zipfile(file) or zipfile.ZipFile(file).testzip() is not None:
                raise invalid
            file.seek(0)
            try:
                state = torch.load(file, map_location="cpu", weights_only=False)
            except (RuntimeError, pickle.UnpicklingError) as error:
                raise invalid from error
        if not isinstance(state, dict) or state.keys() != cls().__getstate__().keys():
            raise invalid
        return cls._from_state(state)

    save_to_disk, load_from_disk = save, load  # names of public verl


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a view, whose pickle would contain the whole base tensor."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


# ---- functions under the names of public verl --------------------------------------------------------------------


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows from the front until `size_divisor` divides the number of rows. Returns (batch, rows added)."""
    return data.pad_to_divisor(size_divisor)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without the last `pad_size` rows."""
    return data.unpad(pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Group consecutive rows: tensors (B, ...) become (new_batch_size, B / new_batch_size, ...)."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise DataProtoValidationError(f"fold: {len(data)} rows do not divide into {new_batch_size} groups")
    tensors = {k: v.unflatten(0, (new_batch_size, -1)) for k, v in data.tensors.items()}
    objects = {k: v.reshape(new_batch_size, -1, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    return DataProto(tensors, objects, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Undo `fold_batch_dim`: the first `batch_dims` dimensions become one."""
    tensors = {k: v.flatten(0, batch_dims - 1) for k, v in data.tensors.items()}
    objects = {k: v.reshape(-1, *v.shape[batch_dims:]) for k, v in data.non_tensor_batch.items()}
    return DataProto(tensors, objects, data.meta_info)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Make a batch from rows that were taken from batches with the same columns. Metadata is not kept."""
    items = list(x)
    names = {k: [item.non_tensor_batch[k] for item in items] for k in items[0].non_tensor_batch}
    for name, rows in names.items():
        if all(isinstance(row, np.ndarray) and row.dtype == object and row.shape == rows[0].shape for row in rows):
            names[name] = np.array(rows, dtype=object)  # of a column of two dimensions
    return DataProto(None if items[0].batch is None else torch.stack([item.batch for item in items]), names)


def all_gather_data_proto(data: DataProto, process_group: torch.distributed.ProcessGroup | None) -> None:
    """Replace the rows by those of all ranks of a process group, in rank order, in place."""
    chunks: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    device = next((v.device for v in data.tensors.values()), "cpu")
    torch.distributed.all_gather_object(chunks, data.copy().to("cpu").select(meta_info_keys=[]), group=process_group)
    gathered = DataProto.concat(chunks).to(device)
    data.non_tensor_batch = gathered.non_tensor_batch
    data.batch = gathered.batch
