"""The containers of a batch, and operations on columns and metadata; `rows.py` has the operations on rows."""

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from verl.columns import DataProtoValidationError, check_layout
from verl.registry import did_you_mean

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal; NaN equals NaN.

    Tensors are equal if shape, dtype and all entries are, on any device. A tensor, an array and a list are never equal
    to each other.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        b = b.to(a.device)
        return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and all(map(same, a.ravel().tolist(), b.ravel().tolist()))
    if isinstance(a, torch.Tensor | np.ndarray) or isinstance(b, torch.Tensor | np.ndarray):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or bool(a != a and b != b)


# entries of meta_info that every operator adds to: merged, while other entries must be equal
MERGED_ENTRIES = ("metrics", "timing")


class _AutoPadding(type):
    """Gives `DataProtoConfig` a class property."""

    auto_padding_key = "_verl_auto_padding"
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        """Whether every batch may be split into chunks of unequal size; VERL_AUTO_PADDING=1 sets it too."""
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise DataProtoValidationError(f"DataProtoConfig.auto_padding: expected True or False, found {enabled!r}")
        cls._enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """Settings of all batches of this process.

    Attributes:
        auto_padding: let `chunk` split a number of rows that the number of chunks does not divide.
        auto_padding_key: the `meta_info` entry that does the same for one batch.
    """


class Containers:
    """Tensor columns, object columns and metadata of one batch. See `DataProto`."""

    def __init__(
        self,
        batch: "TensorDictBase | Mapping[str, torch.Tensor] | None" = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ):
        tensors = dict(batch.items()) if batch is not None else {}
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                value_type = "a tensor without dimensions" if isinstance(value, torch.Tensor) else type(value).__name__
                raise DataProtoValidationError(
                    f"column {name!r}: expected a tensor with one row per entry, found {value_type}"
                )
        objects = {name: _object_column(name, values) for name, values in (non_tensor_batch or {}).items()}
        if twice := tensors.keys() & objects.keys():
            raise DataProtoValidationError(f"the columns {sorted(twice)} are given both as tensors and as objects")
        lengths = {name: values.shape[0] for name, values in (tensors | objects).items()}
        if len(set(lengths.values())) > 1:
            raise DataProtoValidationError(f"the columns of one batch need the same number of rows, found {lengths}")
        # an empty TensorDict keeps its number of rows: select([]) of 4 rows has 4 rows
        size = getattr(batch, "batch_size", ())
        self._rows = next(iter(lengths.values()), size[0] if size else 0)
        self._tensors: dict[str, torch.Tensor] = tensors
        self._batch: TensorDict | None = None  # once `batch` was asked for, it has the tensors
        self._device: torch.device | None = None  # of `batch`, after `to`
        self._is_emptied = hasattr(batch, "batch_size")  # without tensors, `batch` is then empty, not None
        self.non_tensor_batch: dict[str, np.ndarray] = objects
        self.meta_info: dict[str, Any] = dict(meta_info or {})

    # ---- construction -----------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Make a batch from tensor columns (first dimension B) and columns of B objects.

        Args:
            tensors: tensor columns.
            non_tensors: object columns.
            meta_info: metadata of the whole batch.
            num_batch_dims: 1; a batch has one batch dimension.
            auto_padding: let `chunk` split a number of rows that the number of chunks does not divide.
        """
        if num_batch_dims != 1:
            raise DataProtoValidationError(
                f"num_batch_dims: expected 1, found {num_batch_dims}; fold_batch_dim groups the rows of a batch"
            )
        info = {**(meta_info or {}), **({DataProtoConfig.auto_padding_key: True} if auto_padding else {})}
        return cls(tensors, non_tensors, info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Make a batch from one mapping: tensors are tensor columns, everything else (arrays, lists) object columns."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        objects = {k: v for k, v in data.items() if k not in tensors}
        return cls.from_dict(tensors, objects, meta_info, auto_padding=auto_padding)

    def _build(
        self, rows: int, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, Any], meta_info: Mapping[str, Any]
    ) -> Self:
        """Make a batch that has `rows` rows even if it has no columns. Its `batch` is None only if that of this is."""
        built = type(self)(tensors, objects, meta_info)
        built._rows, built._is_emptied = rows, self._is_emptied or bool(self.tensors)
        return built

    def _become(self, source: "Containers") -> Self:
        """Take over the containers of a batch that is not used elsewhere."""
        self.__dict__.update(vars(source))
        return self

    @property
    def batch(self) -> "TensorDict | None":
        """The tensor columns, with batch size (B,); None if the batch never had one."""
        if self._batch is None and (self._tensors or self._is_emptied):
            from tensordict import TensorDict

            self._batch = TensorDict(self._tensors, batch_size=[self._rows], device=self._device)
        return self._batch if self._batch is not None and (self._batch.keys() or self._is_emptied) else None

    @batch.setter
    def batch(self, batch: "TensorDict | None") -> None:
        self._rows = next((len(column) for column in self.non_tensor_batch.values()), len(self))
        self._batch, self._tensors, self._is_emptied = batch, {}, batch is not None

    # ---- metadata ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._rows if self._batch is None else self._batch.batch_size[0]

    def __repr__(self) -> str:
        tensors = [f"{k} {tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for k, v in self.tensors.items()]
        columns = tensors + [f"{k} object" for k in self.non_tensor_batch]
        return f"DataProto({len(self)} rows; {', '.join(columns) or 'no columns'}; meta_info {list(self.meta_info)})"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor columns as a plain dict."""
        return dict((self._tensors if self._batch is None else self._batch).items())

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, tensors first."""
        return (*self.tensors, *self.non_tensor_batch)

    def __contains__(self, name: object) -> bool:
        return name in self.non_tensor_batch or name in self.tensors

    def column(self, name: str) -> torch.Tensor | np.ndarray:
        """Return a column of either kind. Raises DataProtoValidationError if there is none of that name."""
        columns = self.tensors | self.non_tensor_batch
        _require([name], columns, "column")
        return columns[name]

    def copy(self) -> Self:
        """Return the same columns in new containers. Also validates containers that were edited in place."""
        return self._build(len(self), self.tensors, self.non_tensor_batch, self.meta_info)

    def nbytes(self) -> int:
        """Bytes of the tensor columns."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    # ---- columns ----------------------------------------------------------------------------------------------------

    def union(self, other: "Containers") -> Self:
        """Add the columns and metadata of `other` to this batch, in place, and return it.

        A column of both must have equal contents (NaN equals NaN): two writers of one column would otherwise silently
        give a wrong result. The same holds for metadata, except that `metrics` and `timing` are merged. A batch without
        rows and columns can be joined with any other.

        Raises:
            DataProtoValidationError: if rows or contents differ, or a known column has the wrong shape or dtype. The
                batch is then unchanged.
        """
        columns, other_columns = self.tensors | self.non_tensor_batch, other.tensors | other.non_tensor_batch
        if len(self) != len(other) and (columns or len(self)) and (other_columns or len(other)):
            raise DataProtoValidationError(
                f"union of {len(self)} rows with {len(other)} rows: expected the same number of rows"
            )
        for name in columns.keys() & other_columns.keys():
            if not same(columns[name], other_columns[name]):
                raise DataProtoValidationError(
                    f"column {name!r} is in both batches with different contents: rename one, or drop the old one first"
                )
        objects = self.non_tensor_batch | other.non_tensor_batch
        meta_info = _join_meta_info(self.meta_info, other.meta_info)
        joined = self._build(max(len(self), len(other)), self.tensors | other.tensors, objects, meta_info)
        check_layout(joined)
        return self._become(joined)

    def replace(self, **columns: Any) -> Self:
        """Return a new batch with some columns replaced or added (tensors: tensor columns, others: object columns)."""
        return self.drop([name for name in columns if name in self]).union(type(self).from_single_dict(columns))

    def select(
        self,
        batch_keys: str | Sequence[str] | None = None,
        non_tensor_batch_keys: str | Sequence[str] | None = None,
        meta_info_keys: str | Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return only the named tensor columns, object columns and meta_info entries; None keeps all of that kind.

        Args:
            batch_keys: tensor columns.
            non_tensor_batch_keys: object columns.
            meta_info_keys: entries of meta_info.
            deepcopy: copy the objects and the metadata, not only their containers.

        Raises:
            DataProtoValidationError: if a name is unknown.
        """
        selections = {
            "tensor column": (batch_keys, self.tensors),
            "object column": (non_tensor_batch_keys, self.non_tensor_batch),
            "meta_info entry": (meta_info_keys, self.meta_info),
        }
        tensors, objects, meta_info = (
            _select_entries(names, present, kind) for kind, (names, present) in selections.items()
        )
        if deepcopy:
            objects, meta_info = copy.deepcopy(objects), copy.deepcopy(meta_info)
        return self._build(len(self), tensors, objects, meta_info)

    def drop(self, names: str | Sequence[str]) -> Self:
        """Return the batch without the named columns, of either kind. An unknown name is an error."""
        dropped = set(_names(names))
        _require(dropped, self.columns, "column")
        tensors = {k: v for k, v in self.tensors.items() if k not in dropped}
        objects = {k: v for k, v in self.non_tensor_batch.items() if k not in dropped}
        return self._build(len(self), tensors, objects, self.meta_info)

    def pop(
        self,
        batch_keys: str | Sequence[str] | None = (),
        non_tensor_batch_keys: str | Sequence[str] | None = (),
        meta_info_keys: str | Sequence[str] | None = (),
    ) -> Self:
        """Remove the named columns and meta_info entries from this batch, in place, and return them as a new batch."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        popped._is_emptied = False
        remaining = self.drop(popped.columns)
        self._become(remaining)
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in popped.meta_info}
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Rename columns of this batch, in place, and return it."""
        old, new = _names(old_keys), _names(new_keys)
        if len(old) != len(new) or len(set(old)) != len(old):
            raise DataProtoValidationError(f"rename: expected one new name for each old one, found {old} and {new}")
        _require(old, self.columns, "column")
        names = dict(zip(old, new))
        after = [names.get(k, k) for k in self.columns]
        if len(set(after)) != len(after):
            raise DataProtoValidationError(f"rename of {old} to {new} would give two columns the same name")
        tensors = {names.get(k, k): v for k, v in self.tensors.items()}
        objects = {names.get(k, k): v for k, v in self.non_tensor_batch.items()}
        return self._become(self._build(len(self), tensors, objects, self.meta_info))

    def check_consistency(self) -> None:
        """Raise DataProtoValidationError if containers that were edited in place no longer form a batch."""
        self.copy()


# ---- helpers --------------------------------------------------------------------------------------------------------


def _object_column(name: str, values: Any) -> np.ndarray:
    """Return an array as it is, and other values as (B,) objects, even if they are lists of one length."""
    if isinstance(values, np.ndarray) and values.ndim:
        return values
    if not isinstance(values, list | tuple):
        raise DataProtoValidationError(
            f"column {name!r}: expected a tensor, an array or a list with one entry per row, "
            f"found {type(values).__name__}"
        )
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    return column


def _names(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _require(names: Iterable[str], present: Iterable[str], kind: str) -> None:
    for name in names:
        if name not in present:
            raise DataProtoValidationError(f"the batch has no {kind} {name!r}: {did_you_mean(name, present)}")


def _select_entries(names: str | Sequence[str] | None, present: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the entries of `present` in `names`; None: all of them."""
    if names is None:
        return dict(present)
    selected = _names(names)
    _require(selected, present, kind)
    return {name: present[name] for name in selected}


def _join_meta_info(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Join the metadata of two batches; MERGED_ENTRIES are merged, other entries must be equal."""
    for name in first.keys() & second.keys() - set(MERGED_ENTRIES):
        if not same(first[name], second[name]):
            raise DataProtoValidationError(
                f"meta_info[{name!r}] is {first[name]!r:.80} in one batch and {second[name]!r:.80} in the other: "
                "remove one"
            )
    joined = {**first, **second}
    for name in MERGED_ENTRIES:
        if name in first and name in second:
            for value in (first[name], second[name]):
                if not isinstance(value, Mapping):
                    raise DataProtoValidationError(
                        f"meta_info[{name!r}]: expected a dict, found {type(value).__name__}; reduce the list "
                        "that concat returns, one entry per batch, first"
                    )
            joined[name] = {**first[name], **second[name]}
    return joined


def concat_meta_info(meta_infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate metadata: equal entries once, MERGED_ENTRIES as name -> list of the values of all batches."""
    joined: dict[str, Any] = {}
    for meta_info in meta_infos:
        for name, value in meta_info.items():
            if name in MERGED_ENTRIES:
                for part in value if isinstance(value, list) else [value]:
                    if not isinstance(part, Mapping):
                        raise DataProtoValidationError(
                            f"concat: meta_info[{name!r}]: expected a dict or a list of dicts in every batch, found "
                            f"{type(part).__name__}: {part!r:.80}"
                        )
                    lists = joined.setdefault(name, {})
                    for key, entry in part.items():  # a list, as an earlier concat made it, is joined value by value
                        lists.setdefault(key, []).extend(entry if isinstance(entry, list) else [entry])
            elif not same(joined.setdefault(name, value), value):
                raise DataProtoValidationError(
                    f"concat: meta_info[{name!r}] is {joined[name]!r} in one batch and {value!r} in another"
                )
    return joined


# ---- plain containers, under the names of public verl ---------------------------------------------------------------


def union_tensor_dict(tensor_dict1: "TensorDict", tensor_dict2: "TensorDict") -> "TensorDict":
    """Add the entries of the second TensorDict to the first, in place, and return it.

    Raises:
        DataProtoValidationError: if the batch sizes differ, or an entry of both has different contents.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise DataProtoValidationError(
            f"union: expected equal batch sizes, found {tensor_dict1.batch_size} and {tensor_dict2.batch_size}"
        )
    return _union(tensor_dict1, tensor_dict2)


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of the second dict to the first, in place, and return it.

    Raises:
        DataProtoValidationError: if an array of both has different contents.
    """
    return _union(tensor_dict1, tensor_dict2)


def _union(first: Any, second: Any) -> Any:
    for name in set(first.keys()) & set(second.keys()):
        if not same(first[name], second[name]):
            raise DataProtoValidationError(f"union: {name!r} is in both with different contents")
    for name, value in second.items():
        first[name] = value
    return first


def numpy_dict_to_tensor_dict(numpy_dict: Mapping[str, np.ndarray]) -> "TensorDict":
    """A TensorDict without batch dimensions, whose tensors share the memory of the arrays."""
    from tensordict import TensorDict

    return TensorDict({name: torch.from_numpy(array) for name, array in numpy_dict.items()})


def type_info(value: Any) -> str:
    """The type of a value for `get_data_info`; of a container, with the types of what it has."""
    if isinstance(value, list):
        return f"list[{'|'.join(sorted({type_info(entry) for entry in value[:3]})) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(type_info, value))})"
    if isinstance(value, dict) and value:
        key, entry = next(iter(value.items()))
        return f"dict[{type_info(key)}: {type_info(entry)}]"
    return f"ndarray{value.shape} ({value.dtype})" if isinstance(value, np.ndarray) else type(value).__name__


def serialize_single_tensor(obj: torch.Tensor) -> tuple[str, tuple[int, ...] | str, Any]:
    """Convert a tensor to (dtype, shape, bytes as a uint8 array), a nested one to (dtype, layout, its tensors)."""
    if obj.is_nested:
        layout = str(obj.layout).removeprefix("torch.")
        return str(obj.dtype).removeprefix("torch."), layout, [serialize_single_tensor(row) for row in obj.unbind()]
    data = obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), data


def deserialize_single_tensor(arr: tuple[str, Iterable[int] | str, Any]) -> torch.Tensor:
    """Undo `serialize_single_tensor`."""
    dtype, shape, data = arr
    if isinstance(shape, str):
        return torch.nested.as_nested_tensor([*map(deserialize_single_tensor, data)], layout=getattr(torch, shape))
    flat = torch.tensor(np.frombuffer(bytes(data), dtype=np.uint8))
    return flat.view(getattr(torch, dtype)).view(tuple(shape))


def serialize_tensordict(batch: "TensorDict") -> tuple[tuple[int, ...], str | None, dict[str, Any]]:
    """Convert a TensorDict of tensors to (batch size, device, name -> serialized tensor)."""
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, {k: serialize_single_tensor(v) for k, v in batch.items()}


def deserialize_tensordict(arr: tuple[Iterable[int], str | None, dict[str, Any]]) -> "TensorDict":
    """Undo `serialize_tensordict`."""
    from tensordict import TensorDict

    batch_size, device, entries = arr
    tensors = {k: deserialize_single_tensor(v) for k, v in entries.items()}
    return TensorDict(tensors, batch_size=batch_size, device=device)
