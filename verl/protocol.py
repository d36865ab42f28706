"""DataProto: the one batch that travels through a flow, between workers and to disk.

Three parts: `batch` (a TensorDict: columns of tensors that share their first dimension), `non_tensor_batch` (columns of
Python objects, one per row) and `meta_info` (facts about the batch as a whole). Every operation returns a new DataProto
and keeps the rows of all columns together; tensors are shared, not copied, where that is safe to do.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.columns import DataProtoValidationError
from verl.registry import did_you_mean


def _objects(values: Any) -> np.ndarray:
    """A (B,) object array, also when every value is a list of one length (numpy would make a matrix of those)."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, whatever they are made of: arrays, tensors, containers; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.shape == b.shape
            and a.dtype == b.dtype
            and bool(((a == b) | ((a != a) & (b != b))).all())
        )
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.shape != b.shape:
            return False
        return all(_same(x, y) for x, y in zip(a.ravel(), b.ravel()))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    return bool(a == b)


@dataclass
class DataProto:
    """A batch of B rows.

    batch: TensorDict of batch size [B] (or None when there are no tensors).
    non_tensor_batch: name -> object array of shape (B,).
    meta_info: free facts of the whole batch (temperature, metrics ...); never split over rows.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {k: _objects(v) for k, v in self.non_tensor_batch.items()}
        self.check_consistency()

    # ---- construction -------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        """From columns of tensors (first dimension B) and columns of B objects. Unequal lengths are refused by name."""
        tensors, non_tensors = dict(tensors or {}), {k: _objects(v) for k, v in (non_tensors or {}).items()}
        lengths = {k: len(v) for k, v in (tensors | non_tensors).items()}
        if len(set(lengths.values())) > 1:
            raise DataProtoValidationError(f"columns of one batch need the same number of rows, found {lengths}")
        batch = TensorDict(tensors, batch_size=[next(iter(lengths.values()))]) if tensors else None
        return cls(batch, non_tensors, dict(meta_info or {}))

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> "DataProto":
        """From one mapping: tensors become tensor columns, everything else (arrays, lists) object columns."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        for name, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray | list | tuple):
                raise DataProtoValidationError(
                    f"column {name!r}: expected a tensor, an array or a list with one entry per row, "
                    f"found {type(value).__name__}"
                )
        return cls.from_dict(tensors, {k: v for k, v in data.items() if k not in tensors}, meta_info)

    # ---- facts --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor columns as a plain dict (empty when there are none)."""
        return dict(self.batch.items()) if self.batch is not None else {}

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, tensors first."""
        return (*self.tensors, *self.non_tensor_batch)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def column(self, name: str) -> torch.Tensor | np.ndarray:
        """One column, whichever kind it is. Raises DataProtoValidationError that names the nearest column."""
        if name in self.tensors:
            return self.tensors[name]
        if name in self.non_tensor_batch:
            return self.non_tensor_batch[name]
        raise DataProtoValidationError(f"the batch has no column {name!r}: {did_you_mean(name, self.columns)}")

    def check_consistency(self) -> None:
        """Every column has the same number of rows. Free: looks at shapes only."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise DataProtoValidationError(
                f"a DataProto is batched over rows only: expected a TensorDict of batch size [B], "
                f"found {list(self.batch.batch_size)}"
            )
        for name, values in self.non_tensor_batch.items():
            if len(values) != len(self):
                raise DataProtoValidationError(f"column {name!r}: expected {len(self)} rows, found {len(values)}")

    def nbytes(self) -> int:
        """Bytes of the tensor columns."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    # ---- columns ------------------------------------------------------------------------------------------------

    def union(self, other: "DataProto") -> "DataProto":
        """This batch with the columns of `other` added.

        A column that both have must be equal in both: two writers of one name with different numbers are a mistake
        that would otherwise show up as a wrong result only. meta_info of `other` wins, except `metrics` and
        `timing`, which are merged.
        """
        if len(self) != len(other) and self.columns and other.columns:
            raise DataProtoValidationError(
                f"union of {len(self)} rows with {len(other)} rows: the rows must be the same"
            )
        for name in set(self.columns) & set(other.columns):
            if not _same(self.column(name), other.column(name)):
                raise DataProtoValidationError(
                    f"column {name!r} is in both batches with different contents; rename one, or pop the old one first"
                )
        tensors = self.tensors | other.tensors
        meta = self.meta_info | other.meta_info
        for merged in ("metrics", "timing"):
            if merged in self.meta_info and merged in other.meta_info:
                meta[merged] = self.meta_info[merged] | other.meta_info[merged]
        return DataProto.from_dict(tensors, self.non_tensor_batch | other.non_tensor_batch, meta)

    def replace(self, **columns: Any) -> "DataProto":
        """This batch with some columns set anew (tensors to tensor columns, anything else to object columns)."""
        new = DataProto.from_single_dict(columns)
        kept = self.drop([c for c in columns if c in self])
        return kept.union(new)

    def _require(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self:
                raise DataProtoValidationError(f"the batch has no column {name!r}: {did_you_mean(name, self.columns)}")

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Only the named columns and facts; None keeps all of that kind. An unknown name is an error."""
        tensors = self.tensors
        keep_t = list(tensors) if batch_keys is None else list(batch_keys)
        keep_n = list(self.non_tensor_batch) if non_tensor_batch_keys is None else list(non_tensor_batch_keys)
        self._require([*keep_t, *keep_n])
        meta = self.meta_info if meta_info_keys is None else {k: self.meta_info[k] for k in meta_info_keys}
        return DataProto.from_dict({k: tensors[k] for k in keep_t}, {k: self.non_tensor_batch[k] for k in keep_n}, meta)

    def drop(self, names: Sequence[str]) -> "DataProto":
        """All columns but the named ones. An unknown name is an error."""
        self._require(names)
        return self.select(
            [k for k in self.tensors if k not in names], [k for k in self.non_tensor_batch if k not in names]
        )

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> "DataProto":
        """Take the named columns and facts out of this batch (in place) and return them as a batch of their own."""
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        rest = self.drop([*batch_keys, *non_tensor_batch_keys])
        self.batch, self.non_tensor_batch = rest.batch, rest.non_tensor_batch
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in meta_info_keys}
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Columns under new names."""
        old, new = ([k] if isinstance(k, str) else list(k) for k in (old_keys, new_keys))
        if len(old) != len(new):
            raise DataProtoValidationError(f"rename: {len(old)} old names for {len(new)} new names")
        self._require(old)
        names = dict(zip(old, new))
        after = [names.get(k, k) for k in self.columns]
        if len(set(after)) != len(after):
            raise DataProtoValidationError(f"rename of {old} to {new} would give two columns the same name")
        return DataProto.from_dict(
            {names.get(k, k): v for k, v in self.tensors.items()},
            {names.get(k, k): v for k, v in self.non_tensor_batch.items()},
            self.meta_info,
        )

    # ---- rows ---------------------------------------------------------------------------------------------------

    def __getitem__(self, item: Any) -> "DataProto":
        """Rows by slice, index list, boolean mask, or one integer (a batch of one row)."""
        if isinstance(item, int | np.integer):
            item = slice(item, item + 1 or None)
        if isinstance(item, torch.Tensor):
            item = item.cpu().numpy()
        if not isinstance(item, slice):
            item = np.asarray(item)
            if item.dtype != bool:
                item = item.astype(np.int64)
            elif len(item) != len(self):
                raise DataProtoValidationError(f"a row mask of {len(item)} entries on a batch of {len(self)} rows")
        index = item if isinstance(item, slice) else torch.from_numpy(item)
        tensors = {k: v[index if isinstance(index, slice) else index.to(v.device)] for k, v in self.tensors.items()}
        return DataProto.from_dict(tensors, {k: v[item] for k, v in self.non_tensor_batch.items()}, self.meta_info)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """Rows start:end:step."""
        return self[slice(start, end, step)]

    def reorder(self, indices: Any) -> "DataProto":
        """The same rows in another order; `indices` must name each row exactly once."""
        order = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
        if sorted(order.tolist()) != list(range(len(self))):
            raise DataProtoValidationError(
                "reorder needs each row index exactly once; use batch[indices] to choose rows"
            )
        return self[order]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Every row `repeat_times` times: a,a,b,b (interleave) or a,b,a,b."""
        rows = np.arange(len(self))
        return self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Consecutive pieces of `split_size` rows; the last may be shorter."""
        if split_size < 1:
            raise DataProtoValidationError(f"split size must be at least 1, found {split_size}")
        return [self[i : i + split_size] for i in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list["DataProto"]:
        """`chunks` consecutive pieces of equal size. Pad first (`pad_to_divisor`) when they would not be equal."""
        if chunks < 1 or len(self) % chunks:
            raise DataProtoValidationError(
                f"{len(self)} rows do not divide into {chunks} equal chunks; pad_to_divisor({chunks}) makes them"
            )
        return self.split(len(self) // chunks) if len(self) else [self] * chunks

    @staticmethod
    def concat(pieces: Sequence["DataProto"]) -> "DataProto":
        """Pieces one after another. They need the same columns; widths must agree. `metrics` become a list."""
        if not pieces:
            raise DataProtoValidationError("concat of no batches")
        first = pieces[0]
        for i, piece in enumerate(pieces):
            if set(piece.columns) != set(first.columns):
                odd = sorted(set(piece.columns) ^ set(first.columns))
                raise DataProtoValidationError(f"concat: piece {i} and piece 0 differ in the columns {odd}")
        tensors = {}
        for name in first.tensors:
            shapes = {tuple(p.batch[name].shape[1:]) for p in pieces}
            if len(shapes) > 1:
                raise DataProtoValidationError(
                    f"concat: column {name!r} has row shapes {sorted(shapes)}; pad them first"
                )
            tensors[name] = torch.cat([p.batch[name] for p in pieces])
        objects = {k: np.concatenate([p.non_tensor_batch[k] for p in pieces]) for k in first.non_tensor_batch}
        meta: dict[str, Any] = {}
        for piece in pieces:
            meta |= piece.meta_info
        if any("metrics" in p.meta_info for p in pieces):
            meta["metrics"] = [p.meta_info.get("metrics", {}) for p in pieces]
        return DataProto.from_dict(tensors, objects, meta)

    def pad_to_divisor(self, divisor: int) -> tuple["DataProto", int]:
        """Rows repeated from the front until `divisor` divides their number, and how many were added."""
        if not len(self):
            raise DataProtoValidationError("an empty batch cannot be padded: there is no row to repeat")
        padding = -len(self) % divisor
        if not padding:
            return self, 0
        return self[np.concatenate([np.arange(len(self)), np.arange(padding) % len(self)])], padding

    def unpad(self, padding: int) -> "DataProto":
        """Without the last `padding` rows."""
        return self[: len(self) - padding]

    def make_iterator(
        self, mini_batch_size: int, epochs: int = 1, *, shuffle: bool = False, seed: int = 0
    ) -> Iterator["DataProto"]:
        """`epochs` passes in mini-batches of equal size; with `shuffle`, each pass in its own seeded order."""
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise DataProtoValidationError(
                f"mini-batches of {mini_batch_size} do not divide a batch of {len(self)} rows"
            )
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator) if shuffle else torch.arange(len(self))
            for rows in order.split(mini_batch_size):
                yield self[rows] if shuffle else self[int(rows[0]) : int(rows[-1]) + 1]

    # ---- places -------------------------------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> "DataProto":
        """With the tensors on `device`."""
        batch = self.batch.to(device) if self.batch is not None else None
        return DataProto(batch, dict(self.non_tensor_batch), dict(self.meta_info))

    def save(self, path: str | Path) -> None:
        """Write to a file, complete or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().cpu().contiguous() for k, v in self.tensors.items()}
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as out:
            torch.save({"batch": tensors, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(out.name, path)

    @classmethod
    def load(cls, path: str | Path) -> "DataProto":
        """Read what `save` wrote. The file holds Python objects: read files that you trust only."""
        parts = torch.load(path, weights_only=False)
        return cls.from_dict(parts["batch"], parts["non_tensor_batch"], parts["meta_info"])
