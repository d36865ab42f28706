"""DataProto: the one batch that travels through a flow, between workers and to disk.

Three parts: `batch` (a TensorDict: columns of tensors that share their first dimension), `non_tensor_batch` (columns of
Python objects, one per row) and `meta_info` (facts about the batch as a whole).

Every operation but `pop` returns a new DataProto and keeps the rows of all columns together. A DataProto owns its three
containers: a column or a fact set in one never appears in another. The columns themselves are shared where nothing had
to be computed (`select`, `union`, slices), as views are in torch: set a new column instead of writing into an old one.
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

# the facts that every part of a flow adds to: merged where others are replaced
MERGED_FACTS = ("metrics", "timing")


class DataProto:
    """A batch of B rows.

    batch: tensor columns, each of shape (B, ...); a TensorDict, or any mapping to make one from.
    non_tensor_batch: object columns, each an array, list or tuple of B entries; kept as object arrays of shape (B,).
    meta_info: free facts of the whole batch (temperature, metrics ...); never split over rows.

    Raises DataProtoValidationError that names the columns when the numbers of rows differ, when a name is used twice,
    or when a column is neither tensor nor sequence.
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
        # an empty TensorDict still knows its rows: select([]) of 4 rows stays 4 rows
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
        """From columns of tensors (first dimension B) and columns of B objects."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> "DataProto":
        """From one mapping: tensors become tensor columns, everything else (arrays, lists) object columns."""
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
        """One column, whichever kind it is. Raises DataProtoValidationError that names the nearest column."""
        columns = self.tensors | self.non_tensor_batch
        _require([name], columns, "column")
        return columns[name]

    def copy(self) -> "DataProto":
        """The same columns in containers of its own; also checks containers that were edited by hand."""
        return DataProto(self.batch, self.non_tensor_batch, self.meta_info)

    def nbytes(self) -> int:
        """Bytes of the tensor columns."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    # ---- columns ----------------------------------------------------------------------------------------------------

    def union(self, other: "DataProto") -> "DataProto":
        """This batch with the columns and facts of `other` added.

        A column that both have must be equal in both (NaN equals NaN): two writers of one name with different numbers
        are a mistake that would otherwise show up as a wrong result only. Of two facts that of `other`, the later one,
        stands, except `metrics` and `timing`, which are merged. A batch without columns and rows joins any.
        Raises DataProtoValidationError when rows or contents differ, or a known column has the wrong shape or dtype.
        """
        mine, theirs = self.tensors | self.non_tensor_batch, other.tensors | other.non_tensor_batch
        if len(self) != len(other) and (mine or len(self)) and (theirs or len(other)):
            raise DataProtoValidationError(
                f"union of {len(self)} rows with {len(other)} rows: the rows must be the same"
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
        """This batch with some columns set anew (tensors to tensor columns, anything else to object columns)."""
        return self.drop([name for name in columns if name in self]).union(DataProto.from_single_dict(columns))

    def select(
        self,
        batch_keys: str | Sequence[str] | None = None,
        non_tensor_batch_keys: str | Sequence[str] | None = None,
        meta_info_keys: str | Sequence[str] | None = None,
    ) -> "DataProto":
        """Only the named tensor columns, object columns and facts; None keeps all of that kind.

        Raises DataProtoValidationError that names the nearest name when one is unknown.
        """
        parts = {
            "tensor column": (batch_keys, self.tensors),
            "object column": (non_tensor_batch_keys, self.non_tensor_batch),
            "fact in meta_info": (meta_info_keys, self.meta_info),
        }
        tensors, objects, facts = (_chosen(names, present, kind) for kind, (names, present) in parts.items())
        return _build(len(self), tensors, objects, facts)

    def drop(self, names: str | Sequence[str]) -> "DataProto":
        """All columns but the named ones, of either kind. An unknown name is an error."""
        gone = set(_names(names))
        _require(gone, self.columns, "column")
        return self.select(
            [k for k in self.tensors if k not in gone], [k for k in self.non_tensor_batch if k not in gone]
        )

    def pop(
        self,
        batch_keys: str | Sequence[str] = (),
        non_tensor_batch_keys: str | Sequence[str] = (),
        meta_info_keys: str | Sequence[str] = (),
    ) -> "DataProto":
        """Take the named columns and facts out of this batch (in place) and return them as a batch of their own."""
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        rest = self.drop(taken.columns)
        self.batch, self.non_tensor_batch = rest.batch, rest.non_tensor_batch
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in taken.meta_info}
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Columns under new names."""
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
        """Every row `repeat_times` times: a,a,b,b (interleave) or a,b,a,b."""
        _require_positive("repeat_times", repeat_times)
        rows = np.arange(len(self))
        return self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Consecutive pieces of `split_size` rows; the last may be shorter. A batch of no rows is one piece."""
        _require_positive("split_size", split_size)
        return [self[i : i + split_size] for i in range(0, max(len(self), 1), split_size)]

    def chunk(self, chunks: int) -> list["DataProto"]:
        """`chunks` consecutive pieces of equal size. Pad first (`pad_to_divisor`) when they would not be equal."""
        _require_positive("chunks", chunks)
        size, left = divmod(len(self), chunks)
        if left:
            raise DataProtoValidationError(
                f"{len(self)} rows do not divide into {chunks} equal chunks; pad_to_divisor({chunks}) makes them"
            )
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    @staticmethod
    def concat(pieces: Sequence["DataProto"]) -> "DataProto":
        """The rows of all pieces, one after another.

        Columns must agree in names, dtypes and row shapes. Facts must agree too, where several pieces have them:
        pieces are peers, so none of them is the later one. Only `metrics` and `timing` may differ; they become the list
        of what each piece has, for the caller to reduce.
        """
        if not pieces:
            raise DataProtoValidationError("concat of no batches")
        tensors, objects = [piece.tensors for piece in pieces], [piece.non_tensor_batch for piece in pieces]
        for i in range(1, len(pieces)):
            odd = (tensors[0].keys() ^ tensors[i].keys()) | (objects[0].keys() ^ objects[i].keys())
            if odd:
                raise DataProtoValidationError(f"concat: piece {i} and piece 0 differ in the columns {sorted(odd)}")
        for name, column in tensors[0].items():
            for i, piece in enumerate(tensors):
                if piece[name].shape[1:] != column.shape[1:] or piece[name].dtype != column.dtype:
                    raise DataProtoValidationError(
                        f"concat: column {name!r} has rows {tuple(column.shape[1:])} of {column.dtype} in piece 0 and "
                        f"{tuple(piece[name].shape[1:])} of {piece[name].dtype} in piece {i}; pad or convert them first"
                    )
        return _build(
            sum(len(piece) for piece in pieces),
            {k: torch.cat([piece[k] for piece in tensors]) for k in tensors[0]},
            {k: np.concatenate([piece[k] for piece in objects]) for k in objects[0]},
            _concat_facts([piece.meta_info for piece in pieces]),
        )

    def pad_to_divisor(self, divisor: int) -> tuple["DataProto", int]:
        """Rows repeated from the front until `divisor` divides their number, and how many were added."""
        _require_positive("divisor", divisor)
        padding = -len(self) % divisor
        if not padding:
            return self.copy(), 0
        return self[np.arange(len(self) + padding) % len(self)], padding

    def unpad(self, padding: int) -> "DataProto":
        """Without the last `padding` rows."""
        if not 0 <= padding <= len(self):
            raise DataProtoValidationError(f"unpad: expected 0 to {len(self)} rows to take off, found {padding}")
        return self[: len(self) - padding]

    def make_iterator(
        self, mini_batch_size: int, epochs: int = 1, *, shuffle: bool = False, seed: int = 0
    ) -> Iterator["DataProto"]:
        """`epochs` passes in mini-batches of equal size; with `shuffle`, each pass in an order of its own.

        The orders depend on `seed` and the number of rows alone.
        """
        _require_positive("mini_batch_size", mini_batch_size)
        if len(self) % mini_batch_size:
            raise DataProtoValidationError(
                f"mini-batches of {mini_batch_size} rows do not divide a batch of {len(self)} rows"
            )
        generator = torch.Generator().manual_seed(seed)

        def passes() -> Iterator["DataProto"]:
            for _ in range(epochs):
                order = torch.randperm(len(self), generator=generator)
                for start in range(0, len(self), mini_batch_size):
                    rows = slice(start, start + mini_batch_size)
                    yield self[order[rows]] if shuffle else self[rows]

        return passes()  # a generator of its own, so that the checks above happen at the call

    # ---- places -----------------------------------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> "DataProto":
        """With the tensors on `device`."""
        tensors = {k: v.to(device) for k, v in self.tensors.items()}
        return _build(len(self), tensors, self.non_tensor_batch, self.meta_info)

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process or to disk: a piece of a batch takes its own rows along, not all of them."""
        return {
            "rows": len(self),
            "tensors": {k: _own_storage(v.detach()) for k, v in self.tensors.items()},
            "objects": self.non_tensor_batch,
            "facts": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(vars(_build(**state)))

    def save(self, path: str | Path) -> None:
        """Write to a file, complete or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with unfinished.open("wb") as out:
                torch.save(self.to("cpu").__getstate__(), out)
                out.flush()
                os.fsync(out.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "DataProto":
        """Read what `save` wrote, onto the CPU. The file holds Python objects: read files that you trust only.

        Raises DataProtoValidationError when the file is something else, or when it was cut short or damaged.
        """
        refusal = DataProtoValidationError(
            f"{path}: expected a batch written by DataProto.save, found another or a damaged file"
        )
        with Path(path).open("rb") as file:
            # torch.load does not compare the checksums of the archive
            if not zipfile.is_zipfile(file) or zipfile.ZipFile(file).testzip() is not None:
                raise refusal
            file.seek(0)
            try:
                state = torch.load(file, map_location="cpu", weights_only=False)
            except (RuntimeError, pickle.UnpicklingError) as error:
                raise refusal from error
        if not isinstance(state, dict) or state.keys() != cls().__getstate__().keys():
            raise refusal
        return _build(**state)


# ---- helpers --------------------------------------------------------------------------------------------------------


def _build(
    rows: int, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, Any], facts: Mapping[str, Any]
) -> DataProto:
    """A batch that has `rows` rows also when it has no columns."""
    return DataProto(tensors or TensorDict({}, batch_size=[rows]), objects, facts)


def _object_column(name: str, values: Any) -> np.ndarray:
    """A (B,) object array, also when every value is a list of one length (numpy would make a matrix of those)."""
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
    """The entries of `present` that `names` asks for; None asks for all."""
    if names is None:
        return dict(present)
    wanted = _names(names)
    _require(wanted, present, kind)
    return {name: present[name] for name in wanted}


def _require_positive(what: str, number: int) -> None:
    if number < 1:
        raise DataProtoValidationError(f"{what}: expected at least 1, found {number}")


def _row_index(item: Any, rows: int) -> np.ndarray:
    """What a user may choose rows by, as int64 indices from 0 to rows - 1."""
    index = np.asarray(item.cpu() if isinstance(item, torch.Tensor) else item)
    if index.dtype == bool and index.shape == (rows,):
        return np.flatnonzero(index)
    if index.shape == (0,) and not isinstance(item, np.ndarray | torch.Tensor):
        index = index.astype(np.int64)  # numpy takes an empty list for floats
    if not np.issubdtype(index.dtype, np.integer) or index.ndim > 1:
        raise DataProtoValidationError(
            f"rows are chosen by a slice, by integers, or by a mask of {rows} booleans (and a column by "
            f"batch.column(name)), found {item!r}"
        )
    index = index.astype(np.int64).reshape(-1)
    outside = index[(index < -rows) | (index >= rows)]
    if len(outside):
        raise IndexError(f"row {outside[0]} of a batch of {rows} rows")
    return np.where(index < 0, index + rows, index)


def _join_facts(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of both; `theirs` stands, and the merged ones are merged."""
    joined = {**mine, **theirs}
    for name in MERGED_FACTS:
        if name in mine and name in theirs:
            for facts in (mine[name], theirs[name]):
                if not isinstance(facts, Mapping):
                    raise DataProtoValidationError(
                        f"meta_info[{name!r}]: expected a dict, found {type(facts).__name__}; the list that concat "
                        "makes, one entry per piece, has to be reduced first"
                    )
            joined[name] = {**mine[name], **theirs[name]}
    return joined


def _concat_facts(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of pieces that are peers: equal ones once, the merged ones as a list of what each piece has."""
    joined: dict[str, Any] = {}
    for facts in pieces:
        for name, value in facts.items():
            if name in MERGED_FACTS:
                joined[name] = joined.get(name, []) + (value if isinstance(value, list) else [value])
            elif not same(joined.setdefault(name, value), value):
                raise DataProtoValidationError(
                    f"concat: meta_info[{name!r}] is {joined[name]!r} in one piece and {value!r} in another"
                )
    return joined


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own size: pickling a view would take the whole of its base along."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
