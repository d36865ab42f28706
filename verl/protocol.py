"""DataProto: the batch that passes through a flow, between workers and to disk.

It has three containers: `batch` (a TensorDict: tensor columns with the same first dimension), `non_tensor_batch`
(columns of Python objects, one per row) and `meta_info` (facts about the whole batch).

    batch = DataProto.from_dict({"responses": ids}, {"uid": ["a", "b"]}, {"temperature": 1.0})
    batch = batch.union(DataProto.from_dict({"advantages": advantages}))
    mini_batches = batch.split(32)

Every operation except `pop` returns a new DataProto with new containers: a column or fact set in one batch never
appears in another. The columns are shared where nothing has to be computed (`select`, `union`, slices), like views in
torch: set a new column instead of writing into an existing one.
"""

import os
import pickle
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl.columns import DataProtoValidationError, check_layout
from verl.registry import did_you_mean
from verl.utils.equality import same

# facts that every operator adds to: merged, while other facts are replaced
MERGED_FACTS = ("metrics", "timing")


class DataProto:
    """A batch of B rows.

    Args:
        batch: tensor columns, each of shape (B, ...); a TensorDict or any mapping.
        non_tensor_batch: object columns, each an array, list or tuple of B entries; stored as (B,) object arrays.
        meta_info: facts about the whole batch (temperature, metrics, ...); not split with the rows.

    Raises:
        DataProtoValidationError: if the numbers of rows differ, a name is used twice, or a column is neither a tensor
            nor a sequence.
    """

    def __init__(
        self,
        batch: TensorDictBase | Mapping[str, torch.Tensor] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ):
        tensors = dict(batch.items()) if batch is not None else {}
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                found = "a tensor without dimensions" if isinstance(value, torch.Tensor) else type(value).__name__
                raise DataProtoValidationError(
                    f"column {name!r}: expected a tensor with one row per entry, found {found}"
                )
        objects = {name: _object_column(name, values) for name, values in (non_tensor_batch or {}).items()}
        if twice := tensors.keys() & objects.keys():
            raise DataProtoValidationError(f"the columns {sorted(twice)} are given both as tensors and as objects")
        lengths = {name: values.shape[0] for name, values in (tensors | objects).items()}
        if len(set(lengths.values())) > 1:
            raise DataProtoValidationError(f"the columns of one batch need the same number of rows, found {lengths}")
        # an empty TensorDict keeps its number of rows: select([]) of 4 rows has 4 rows
        bare = batch.batch_size[0] if isinstance(batch, TensorDictBase) and batch.batch_size else 0
        self.batch: TensorDict = TensorDict(tensors, batch_size=[next(iter(lengths.values()), bare)])
        self.non_tensor_batch: dict[str, np.ndarray] = objects
        self.meta_info: dict[str, Any] = dict(meta_info or {})

    # ---- construction -----------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        """Make a batch from tensor columns (first dimension B) and columns of B objects."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> "DataProto":
        """Make a batch from one mapping: tensors are tensor columns, everything else (arrays, lists) object columns."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        return cls(tensors, {k: v for k, v in data.items() if k not in tensors}, meta_info)

    # ---- facts ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.batch.batch_size[0]

    def __repr__(self) -> str:
        tensors = [f"{k} {tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for k, v in self.tensors.items()]
        columns = tensors + [f"{k} object" for k in self.non_tensor_batch]
        return f"DataProto({len(self)} rows; {', '.join(columns) or 'no columns'}; meta_info {list(self.meta_info)})"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor columns as a plain dict."""
        return dict(self.batch.items())

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

    def copy(self) -> "DataProto":
        """Return the same columns in new containers. Also validates containers that were edited in place."""
        return DataProto(self.batch, self.non_tensor_batch, self.meta_info)

    def nbytes(self) -> int:
        """Bytes of the tensor columns."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    # ---- columns ----------------------------------------------------------------------------------------------------

    def union(self, other: "DataProto") -> "DataProto":
        """Return this batch with the columns and facts of `other` added.

        A column of both must have equal contents (NaN equals NaN): two writers of one column would otherwise silently
        give a wrong result. A fact of both is taken from `other`; `metrics` and `timing` are merged. A batch without
        rows and columns can be joined with any other.

        Raises:
            DataProtoValidationError: if rows or contents differ, or a known column has the wrong shape or dtype.
        """
        mine, theirs = self.tensors | self.non_tensor_batch, other.tensors | other.non_tensor_batch
        if len(self) != len(other) and (mine or len(self)) and (theirs or len(other)):
            raise DataProtoValidationError(
                f"union of {len(self)} rows with {len(other)} rows: expected the same number of rows"
            )
        for name in mine.keys() & theirs.keys():
            if not same(mine[name], theirs[name]):
                raise DataProtoValidationError(
                    f"column {name!r} is in both batches with different contents: rename one, or drop the old one first"
                )
        objects = self.non_tensor_batch | other.non_tensor_batch
        facts = _join_facts(self.meta_info, other.meta_info)
        joined = _build(max(len(self), len(other)), self.tensors | other.tensors, objects, facts)
        check_layout(joined)
        return joined

    def replace(self, **columns: Any) -> "DataProto":
        """Return this batch with some columns replaced or added (tensors: tensor columns, others: object columns)."""
        return self.drop([name for name in columns if name in self]).union(DataProto.from_single_dict(columns))

    def select(
        self,
        batch_keys: str | Sequence[str] | None = None,
        non_tensor_batch_keys: str | Sequence[str] | None = None,
        meta_info_keys: str | Sequence[str] | None = None,
    ) -> "DataProto":
        """Return only the named tensor columns, object columns and facts; None keeps all of that kind.

        Raises:
            DataProtoValidationError: if a name is unknown.
        """
        chosen = {
            "tensor column": (batch_keys, self.tensors),
            "object column": (non_tensor_batch_keys, self.non_tensor_batch),
            "fact in meta_info": (meta_info_keys, self.meta_info),
        }
        tensors, objects, facts = (_chosen(names, present, kind) for kind, (names, present) in chosen.items())
        return _build(len(self), tensors, objects, facts)

    def drop(self, names: str | Sequence[str]) -> "DataProto":
        """Return the batch without the named columns, of either kind. An unknown name is an error."""
        dropped = set(_names(names))
        _require(dropped, self.columns, "column")
        return self.select(
            [k for k in self.tensors if k not in dropped], [k for k in self.non_tensor_batch if k not in dropped]
        )

    def pop(
        self,
        batch_keys: str | Sequence[str] = (),
        non_tensor_batch_keys: str | Sequence[str] = (),
        meta_info_keys: str | Sequence[str] = (),
    ) -> "DataProto":
        """Remove the named columns and facts from this batch, in place, and return them as a new batch."""
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        rest = self.drop(taken.columns)
        self.batch, self.non_tensor_batch = rest.batch, rest.non_tensor_batch
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in taken.meta_info}
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Return the batch with columns renamed."""
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
        return _build(len(self), tensors, objects, self.meta_info)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def __getitem__(self, item: Any) -> "DataProto":
        """Rows by slice (views), by a list, array or tensor of indices, by boolean mask, or one row by an integer.

        Negative indices count from the end. Raises IndexError when an index is out of range.
        """
        if isinstance(item, slice) and (item.step is None or item.step > 0):
            rows = len(range(len(self))[item])
            tensors = {k: v[item] for k, v in self.tensors.items()}
        else:  # torch has no slices of a negative step: they are indices too
            is_slice = isinstance(item, slice)
            item = np.arange(*item.indices(len(self))) if is_slice else _row_index(item, len(self))
            rows = len(item)
            on = {device: torch.tensor(item, device=device) for device in {v.device for v in self.tensors.values()}}
            tensors = {k: v.index_select(0, on[v.device]) for k, v in self.tensors.items()}
        objects = {k: v[item] for k, v in self.non_tensor_batch.items()}
        return _build(rows, tensors, objects, self.meta_info)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """Rows start:end:step."""
        return self[slice(start, end, step)]

    def reorder(self, indices: Any) -> "DataProto":
        """The same rows in another order; `indices` must name each row exactly once."""
        order = _row_index(indices, len(self))
        if not np.array_equal(np.sort(order), np.arange(len(self))):
            raise DataProtoValidationError(
                f"reorder needs each index of the {len(self)} rows exactly once; batch[indices] chooses rows"
            )
        return self[order]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Repeat every row `repeat_times` times: a,a,b,b (interleave) or a,b,a,b."""
        _require_positive("repeat_times", repeat_times)
        rows = np.arange(len(self))
        return self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Split into consecutive chunks of `split_size` rows; the last may be shorter. Zero rows give one chunk."""
        _require_positive("split_size", split_size)
        return [self[i : i + split_size] for i in range(0, max(len(self), 1), split_size)]

    def chunk(self, chunks: int) -> list["DataProto"]:
        """Split into `chunks` consecutive chunks of equal size. If they do not divide the rows, pad first."""
        _require_positive("chunks", chunks)
        size, left = divmod(len(self), chunks)
        if left:
            raise DataProtoValidationError(
                f"{len(self)} rows do not divide into {chunks} equal chunks; call pad_to_divisor({chunks}) first"
            )
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    @staticmethod
    def concat(batches: Sequence["DataProto"]) -> "DataProto":
        """Concatenate the rows of several batches.

        Columns must agree in names, dtypes and row shapes. Facts that several batches have must be equal. Only
        `metrics` and `timing` may differ; they become the list of those of each batch, for the caller to reduce.
        """
        if not batches:
            raise DataProtoValidationError("concat: expected at least one batch, found none")
        tensors, objects = [batch.tensors for batch in batches], [batch.non_tensor_batch for batch in batches]
        for i in range(1, len(batches)):
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
        return _build(
            sum(len(batch) for batch in batches),
            {k: torch.cat([columns[k] for columns in tensors]) for k in tensors[0]},
            {k: np.concatenate([columns[k] for columns in objects]) for k in objects[0]},
            _concat_facts([batch.meta_info for batch in batches]),
        )

    def pad_to_divisor(self, divisor: int) -> tuple["DataProto", int]:
        """Append rows from the front until `divisor` divides the number of rows. Returns (batch, rows added)."""
        _require_positive("divisor", divisor)
        padding = -len(self) % divisor
        if not padding:
            return self.copy(), 0
        return self[np.arange(len(self) + padding) % len(self)], padding

    def unpad(self, padding: int) -> "DataProto":
        """Return the batch without the last `padding` rows."""
        if not 0 <= padding <= len(self):
            raise DataProtoValidationError(f"unpad: expected 0 to {len(self)} rows, found {padding}")
        return self[: len(self) - padding]

    def make_iterator(
        self, mini_batch_size: int, epochs: int = 1, *, shuffle: bool = False, seed: int = 0
    ) -> Iterator["DataProto"]:
        """Iterate `epochs` times over mini-batches of equal size.

        With `shuffle`, each epoch has a new order, which depends only on `seed` and the number of rows.
        """
        _require_positive("mini_batch_size", mini_batch_size)
        if len(self) % mini_batch_size:
            raise DataProtoValidationError(
                f"mini-batches of {mini_batch_size} rows do not divide a batch of {len(self)} rows"
            )
        generator = torch.Generator().manual_seed(seed)

        def mini_batches() -> Iterator["DataProto"]:
            for _ in range(epochs):
                order = torch.randperm(len(self), generator=generator)
                for start in range(0, len(self), mini_batch_size):
                    rows = slice(start, start + mini_batch_size)
                    yield self[order[rows]] if shuffle else self[rows]

        return mini_batches()  # an inner generator, so that the checks above run at the call

    # ---- devices, files ---------------------------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> "DataProto":
        """Return the batch with its tensors on `device`."""
        tensors = {k: v.to(device) for k, v in self.tensors.items()}
        return _build(len(self), tensors, self.non_tensor_batch, self.meta_info)

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling. A chunk of a batch is pickled with its own rows only, not with its base tensors."""
        return {
            "rows": len(self),
            "tensors": {k: _own_storage(v.detach()) for k, v in self.tensors.items()},
            "objects": self.non_tensor_batch,
            "facts": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(vars(_build(**state)))

    def save(self, path: str | Path) -> None:
        """Write to a file, atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("wb") as out:
                torch.save(self.to("cpu").__getstate__(), out)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "DataProto":
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
        return _build(**state)


# ---- helpers --------------------------------------------------------------------------------------------------------


def _build(
    rows: int, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, Any], facts: Mapping[str, Any]
) -> DataProto:
    """Make a batch that has `rows` rows even if it has no columns."""
    return DataProto(tensors or TensorDict({}, batch_size=[rows]), objects, facts)


def _object_column(name: str, values: Any) -> np.ndarray:
    """Return a (B,) object array, also if all values are lists of one length (numpy would make a matrix)."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    if not isinstance(values, np.ndarray | list | tuple) or (isinstance(values, np.ndarray) and values.ndim == 0):
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


def _chosen(names: str | Sequence[str] | None, present: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the entries of `present` in `names`; None: all of them."""
    if names is None:
        return dict(present)
    wanted = _names(names)
    _require(wanted, present, kind)
    return {name: present[name] for name in wanted}


def _require_positive(what: str, number: int) -> None:
    if number < 1:
        raise DataProtoValidationError(f"{what}: expected at least 1, found {number}")


def _row_index(item: Any, rows: int) -> np.ndarray:
    """Convert an index of any supported kind to int64 indices from 0 to rows - 1."""
    index = np.asarray(item.cpu() if isinstance(item, torch.Tensor) else item)
    if index.dtype == bool and index.shape == (rows,):
        return np.flatnonzero(index)
    if index.shape == (0,) and not isinstance(item, np.ndarray | torch.Tensor):
        index = index.astype(np.int64)  # numpy makes an empty list a float array
    if not np.issubdtype(index.dtype, np.integer) or index.ndim > 1:
        raise DataProtoValidationError(
            f"expected a slice, integers or a mask of {rows} booleans to select rows, found {item!r}; use "
            "batch.column(name) for a column"
        )
    index = index.astype(np.int64).reshape(-1)
    outside = index[(index < -rows) | (index >= rows)]
    if len(outside):
        raise IndexError(f"row {outside[0]} is out of range for a batch of {rows} rows")
    return np.where(index < 0, index + rows, index)


def _join_facts(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Join the facts of two batches; `theirs` takes precedence, MERGED_FACTS are merged."""
    joined = {**mine, **theirs}
    for name in MERGED_FACTS:
        if name in mine and name in theirs:
            for facts in (mine[name], theirs[name]):
                if not isinstance(facts, Mapping):
                    raise DataProtoValidationError(
                        f"meta_info[{name!r}]: expected a dict, found {type(facts).__name__}; reduce the list "
                        "that concat returns, one entry per batch, first"
                    )
            joined[name] = {**mine[name], **theirs[name]}
    return joined


def _concat_facts(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate facts: equal ones once, MERGED_FACTS as the list of those of each batch."""
    joined: dict[str, Any] = {}
    for facts in batches:
        for name, value in facts.items():
            if name in MERGED_FACTS:
                joined[name] = joined.get(name, []) + (value if isinstance(value, list) else [value])
            elif not same(joined.setdefault(name, value), value):
                raise DataProtoValidationError(
                    f"concat: meta_info[{name!r}] is {joined[name]!r} in one batch and {value!r} in another"
                )
    return joined


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a view, whose pickle would contain the whole base tensor."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
