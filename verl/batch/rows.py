"""Operations on the rows of a batch: choosing, repeating, splitting, joining, padding."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader

from verl.batch.containers import DataProtoConfig
from verl.columns import DataProtoValidationError

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass
class DataProtoItem:
    """One row of a batch, as `batch[i]` returns it.

    Attributes:
        batch: the row of every tensor column, without the batch dimension: `item.batch["responses"]` has shape (T,).
            None if there are none, as in `DataProto`.
        non_tensor_batch: the entry of every object column.
        meta_info: the metadata of the batch.
    """

    batch: "TensorDict | None" = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class Rows:
    """The operations on rows. They use the containers and constructors of `Containers`; see `DataProto`."""

    # ---- choosing ---------------------------------------------------------------------------------------------------

    def __getitem__(self, item: Any) -> "Self | DataProtoItem":
        """Rows by slice (views), by a list, array or tensor of indices, or by boolean mask; one row by an integer.

        Negative indices count from the end.

        Returns:
            A DataProtoItem for an integer, a batch for anything else.

        Raises:
            IndexError: if an index is out of range.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        index = _row_index(item, len(self))
        return self._item(int(index)) if index.ndim == 0 else self._take(index)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(i) for i in range(len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows start:end:step."""
        item = slice(start, end, step)
        if step is not None and step < 0:  # torch does not support slices with a negative step
            return self._take(np.arange(*item.indices(len(self))))
        tensors = {k: v[item] for k, v in self.tensors.items()}
        objects = {k: v[item] for k, v in self.non_tensor_batch.items()}
        return self._build(len(range(len(self))[item]), tensors, objects, self.meta_info)

    def select_idxs(self, idxs: Any) -> Self:
        """Rows by a list, array or tensor of indices, or by boolean mask."""
        return self._take(_row_index(idxs, len(self)).reshape(-1))

    def _take(self, index: np.ndarray) -> Self:
        """The rows of an (R,) int64 array of valid indices."""
        on = {device: torch.tensor(index, device=device) for device in {v.device for v in self.tensors.values()}}
        tensors = {k: v.index_select(0, on[v.device]) for k, v in self.tensors.items()}
        objects = {k: v[index] for k, v in self.non_tensor_batch.items()}
        return self._build(len(index), tensors, objects, self.meta_info)

    def _item(self, row: int) -> DataProtoItem:
        tensors = None if self.batch is None else self.batch[row]
        return DataProtoItem(tensors, {k: v[row] for k, v in self.non_tensor_batch.items()}, self.meta_info)

    def reorder(self, indices: Any) -> Self:
        """Put the rows into another order, in place, and return the batch; `indices` names each row exactly once."""
        order = _row_index(indices, len(self)).reshape(-1)
        if not np.array_equal(np.sort(order), np.arange(len(self))):
            raise DataProtoValidationError(
                f"reorder: expected each index of the {len(self)} rows exactly once; select rows with batch[indices]"
            )
        return self._become(self._take(order))

    # ---- repeating --------------------------------------------------------------------------------------------------

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat every row `repeat_times` times: a,a,b,b (interleave) or a,b,a,b."""
        _require_positive("repeat_times", repeat_times)
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Repeat row i `repeat_times[i]` times: [2, 1] gives a,a,b."""
        times = np.asarray(repeat_times.cpu() if isinstance(repeat_times, torch.Tensor) else repeat_times)
        if times.shape != (len(self),) or (len(times) and (times.dtype.kind not in "iu" or times.min() < 0)):
            raise DataProtoValidationError(
                f"repeat_times: expected one number of at least 0 for each of the {len(self)} rows, found {times!r}"
            )
        return self._take(np.repeat(np.arange(len(self)), times.astype(np.int64)))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Split the columns `split_keys` along their second dimension into `n_split` chunks, and make each a row.

        A row of two chunks becomes two rows, one after the other. Other columns are repeated.
        """
        _require_positive("n_split", n_split)
        repeated, split = self.repeat(n_split), set(split_keys or ())
        tensors = {
            k: v.unflatten(1, (n_split, -1)).flatten(0, 1) if k in split else repeated.tensors[k]
            for k, v in self.tensors.items()
        }
        objects = {
            k: _split_entries(v, n_split) if k in split else repeated.non_tensor_batch[k]
            for k, v in self.non_tensor_batch.items()
        }
        return self._build(len(repeated), tensors, objects, self.meta_info)

    # ---- splitting and joining --------------------------------------------------------------------------------------

    def split(self, split_size: int) -> list[Self]:
        """Split into consecutive chunks of `split_size` rows; the last may be shorter. Zero rows give one chunk."""
        _require_positive("split_size", split_size)
        return [self[i : i + split_size] for i in range(0, max(len(self), 1), split_size)]

    def chunk(self, chunks: int) -> list[Self]:
        """Split into `chunks` consecutive chunks of equal size.

        With automatic padding (`is_padding_enabled`), the number of rows need not be divisible: all chunks have the
        size rounded up, but the last ones are shorter or empty.
        """
        _require_positive("chunks", chunks)
        size = -(-len(self) // chunks)
        if size * chunks != len(self) and not self.is_padding_enabled():
            raise DataProtoValidationError(
                f"{len(self)} rows do not divide into {chunks} equal chunks: call pad_to_divisor({chunks}) first, or "
                "enable DataProtoConfig.auto_padding for unequal chunks"
            )
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    # ---- padding ----------------------------------------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Whether `chunk` may return chunks of unequal size, for this batch or for all (`DataProtoConfig`)."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append a row `padding_size` times, in place.

        Args:
            padding_size: number of rows to append.
            padding_candidate: "first" or "last", the row that is appended.
        """
        if padding_candidate not in ("first", "last", ""):
            raise DataProtoValidationError(f"padding_candidate: expected first or last, found {padding_candidate!r}")
        if padding_size:
            row = 0 if padding_candidate == "first" else len(self) - 1
            self._become(self.select_idxs([*range(len(self)), *[row] * padding_size]))

    def pad_to_divisor(self, divisor: int) -> tuple[Self, int]:
        """Append rows from the front until `divisor` divides the number of rows. Returns (batch, rows added)."""
        _require_positive("divisor", divisor)
        padding = -len(self) % divisor
        if not padding:
            return self.copy(), 0
        return self._take(np.arange(len(self) + padding) % len(self)), padding

    def unpad(self, padding: int) -> Self:
        """Return the batch without the last `padding` rows."""
        if not 0 <= padding <= len(self):
            raise DataProtoValidationError(f"unpad: expected 0 to {len(self)} rows, found {padding}")
        return self[: len(self) - padding]

    # ---- mini-batches -----------------------------------------------------------------------------------------------

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        *,
        shuffle: bool = False,
    ) -> Iterator[Self]:
        """Iterate `epochs` times over mini-batches of equal size.

        Args:
            mini_batch_size: rows of a mini-batch; it must divide the number of rows.
            epochs: passes over the rows.
            seed: seed of the order with `shuffle`, the one of a torch DataLoader; None takes it from torch's global
                generator.
            dataloader_kwargs: {"shuffle": True} is the same as `shuffle`; no other entry is supported.
            shuffle: a new order for each epoch.
        """
        _require_positive("mini_batch_size", mini_batch_size)
        if len(self) % mini_batch_size:
            raise DataProtoValidationError(
                f"mini_batch_size={mini_batch_size} does not divide the {len(self)} rows of the batch: use a divisor"
            )
        options = dict(dataloader_kwargs or {})
        shuffle = bool(options.pop("shuffle", shuffle))
        if options:
            raise DataProtoValidationError(
                f"dataloader_kwargs: expected shuffle only, found {sorted(options)}: the rows are in memory, so remove "
                "them"
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        numbers = range(len(self))
        loader = DataLoader(numbers, mini_batch_size, shuffle=shuffle, generator=generator, collate_fn=list)

        def mini_batches() -> Iterator[Self]:
            for _ in range(epochs):
                for rows in loader:  # a loader of row numbers gives the order of public verl
                    yield self[rows] if shuffle else self[rows[0] : rows[-1] + 1]

        return mini_batches()  # an inner generator, so that the checks above run at the call


# ---- helpers --------------------------------------------------------------------------------------------------------


class _IndexError(DataProtoValidationError, TypeError):
    """An index of a type that selects no rows: a TypeError in public verl."""


def _require_positive(name: str, number: int) -> None:
    if number < 1:
        raise DataProtoValidationError(f"{name}: expected at least 1, found {number}")


def _split_entries(column: np.ndarray, n_split: int) -> Any:
    """The entries of a column (B,) of sequences, or the rows (B, C) of an array, in `n_split` chunks each."""
    if column.ndim > 1:
        return column.reshape(len(column) * n_split, -1, *column.shape[2:])
    return [chunk for row in column for chunk in np.split(np.asarray(row, dtype=object), n_split)]


def _row_index(item: Any, rows: int) -> np.ndarray:
    """Convert an index of any supported kind to int64 indices from 0 to rows - 1: () for an integer, else (R,)."""
    index = np.asarray(item.cpu() if isinstance(item, torch.Tensor) else item)
    if index.dtype == bool and index.shape == (rows,):
        return np.flatnonzero(index)
    if index.shape == (0,) and not isinstance(item, np.ndarray | torch.Tensor):
        index = index.astype(np.int64)  # numpy makes an empty list a float array
    if not np.issubdtype(index.dtype, np.integer) or index.ndim > 1:
        raise _IndexError(
            f"expected a slice, integers or a mask of {rows} booleans to select rows, found {item!r}; use "
            "batch.column(name) for a column"
        )
    index = index.astype(np.int64)
    outside = index[(index < -rows) | (index >= rows)]
    if len(outside):
        raise IndexError(f"row {outside[0]} is out of range for a batch of {rows} rows")
    return np.where(index < 0, index + rows, index)
