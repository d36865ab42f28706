"""Rows of data files, and the order in which training walks over them.

read_rows(files) -> Rows                       parquet, jsonl, json
ResumableSampler                               row numbers, batch after batch, for ever; exact resume
PromptSource                                   the same as a source of `DataProto` batches: the head of a flow
"""

import bisect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.protocol import DataProto

_CHUNK = 1024  # rows turned from Arrow into Python objects at a time


class _ParquetPart:
    """The rows of one parquet file; they become Python objects when they are asked for."""

    def __init__(self, path: Path):
        try:
            self.table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: expected a parquet file, but it cannot be read: {error}") from error
        self.path = path
        self.columns = tuple(self.table.column_names)

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.table.slice(row, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), _CHUNK):
            yield from self.table.slice(start, _CHUNK).to_pylist()

    def where(self, row: int) -> str:
        return f"{self.path}, row {row} (the first is 0)"

    def to_table(self) -> pa.Table:
        return self.table


class _JsonPart:
    """The rows of one file of JSON objects, one a line or all in a list. A key that a row lacks is None in that row."""

    def __init__(self, path: Path):
        self.path = path
        try:
            text = path.read_text(encoding="utf-8-sig")  # some programs put a mark before the first line
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected UTF-8 text: {error}") from error
        self.is_list = text.lstrip().startswith("[")
        self.places: list[int] = []
        rows = self._parse_list(text) if self.is_list else self._parse_lines(text)
        self.columns = tuple(dict.fromkeys(key for row in rows for key in row))
        empty = dict.fromkeys(self.columns)
        self.rows = [empty | row for row in rows]

    def _parse_list(self, text: str) -> list[dict[str, Any]]:
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path}: expected a JSON list of objects: {error}") from error
        self.places = list(range(len(rows)))
        return [self._check_object(row, i) for i, row in enumerate(rows)]

    def _parse_lines(self, text: str) -> list[dict[str, Any]]:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would also split inside JSON strings
            if not line.strip():
                continue
            self.places.append(number)
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                what = f"expected one JSON object a line: {error.msg} at character {error.pos + 1}"
                raise ValueError(f"{self.path}, line {number}: {what}") from error
            rows.append(self._check_object(row, len(rows)))
        return rows

    def _check_object(self, row: Any, index: int) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise ValueError(
                f'{self.where(index)}: expected a JSON object such as {{"prompt": ...}}, found {type(row).__name__}'
            )
        return row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(self.rows[row])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(row) for row in self.rows)

    def where(self, row: int) -> str:
        place = self.places[row]
        return f"{self.path}, row {place} (the first is 0)" if self.is_list else f"{self.path}, line {place}"

    def to_table(self) -> pa.Table:
        try:
            return pa.Table.from_pylist(self.rows)
        except pa.ArrowException as error:
            raise ValueError(f"{self.path}: its values do not fit into one type a column: {error}") from error


_READERS = {".parquet": _ParquetPart, ".jsonl": _JsonPart, ".json": _JsonPart}


class Rows(Sequence):
    """The rows of one or several files, one after another, as dicts that all have the keys `columns`."""

    def __init__(self, parts: Sequence[_ParquetPart | _JsonPart]):
        self.parts = list(parts)
        self.columns = self.parts[0].columns
        self._ends = np.cumsum([len(part) for part in self.parts]).tolist()

    def _locate(self, row: int) -> tuple[_ParquetPart | _JsonPart, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        part = bisect.bisect_right(self._ends, row)
        return self.parts[part], row - (self._ends[part - 1] if part else 0)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        part, local = self._locate(row)
        return part[local]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            yield from part

    def where(self, row: int) -> str:
        """File and row (or line) as a user finds it there."""
        part, local = self._locate(row)
        return part.where(local)

    def to_table(self) -> pa.Table:
        """All rows as an Arrow table; columns of parquet files keep their types.

        Raises ValueError for JSON values that do not fit into one type a column, or files that differ in their types.
        """
        tables = [part.to_table().select(self.columns) for part in self.parts]
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            names = ", ".join(str(part.path) for part in self.parts)
            raise ValueError(f"{names}: columns of one name differ in their types: {error}") from error

    def file_type(self, row: int) -> str:
        """The ending of the file that a row came from: "parquet", "jsonl" or "json"."""
        return self._locate(row)[0].path.suffix.lower().lstrip(".")


def file_list(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """One path or several -> a list of paths, `~` expanded. Raises ValueError for anything else, or for none."""
    given = [files] if isinstance(files, str | Path) else files
    if not isinstance(given, Sequence) or not all(isinstance(f, str | Path) for f in given):
        raise ValueError(f"data files: expected a path or a list of paths, found {files!r}")
    if not given:
        raise ValueError("data files: expected a path or a list of paths, found an empty list")
    return [Path(f).expanduser() for f in given]


def read_rows(files: str | Path | Sequence[str | Path]) -> Rows:
    """Read .parquet, .jsonl and .json files as one sequence of rows.

    Raises:
        ValueError: a file that is missing, has another ending, holds no rows or cannot be read (with the line), or
            files whose columns differ. Patterns such as `*.parquet` are not expanded: give the list.
    """
    parts: list[_ParquetPart | _JsonPart] = []
    for path in file_list(files):
        if not path.is_file():
            what = "a folder" if path.is_dir() else "no such file"
            raise ValueError(f"{path}: expected a data file, found {what}")
        if path.suffix.lower() not in _READERS:
            raise ValueError(
                f"{path}: expected a file that ends with {', '.join(_READERS)}, found {path.suffix or 'no ending'}"
            )
        part = _READERS[path.suffix.lower()](path)
        if len(part) == 0:
            raise ValueError(f"{path}: the file holds no rows")
        if parts and set(part.columns) != set(parts[0].columns):
            missing = sorted(set(parts[0].columns) - set(part.columns))
            extra = sorted(set(part.columns) - set(parts[0].columns))
            raise ValueError(
                f"{path}: expected the same columns as {parts[0].path}; missing: {missing or 'none'}, "
                f"not in the first file: {extra or 'none'}. Write the files with the same columns"
            )
        parts.append(part)
    return Rows(parts)


class ResumableSampler:
    """Row numbers in batches of `batch_size`, for ever: epoch after epoch, each in an order of its own.

    The order of an epoch depends on (seed, epoch) alone. The rows that do not fill a last batch are left out of that
    epoch; which rows these are changes from epoch to epoch when `shuffle` is on.

    epoch, step_in_epoch: the position of the batch that comes next.
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int = 0, shuffle: bool = True):
        if batch_size < 1:
            raise ValueError(f"batch size: expected at least 1, found {batch_size}")
        if batch_size > num_rows:
            raise ValueError(
                f"a batch of {batch_size:,} prompts needs as many rows, but the data set has {num_rows:,}: "
                "lower data.train_batch_size or add data"
            )
        if seed < 0:
            raise ValueError(f"seed: expected a number from 0, found {seed}")
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.step_in_epoch = 0
        self._order: np.ndarray | None = None  # of the current epoch, made when it is first needed

    @property
    def steps_per_epoch(self) -> int:
        return self.num_rows // self.batch_size

    def describe(self) -> str:
        """The figures in words: "7,473 rows: 29 steps of 256 an epoch, 49 rows left out each epoch"."""
        left_out = self.num_rows % self.batch_size
        return (
            f"{self.num_rows:,} rows: {self.steps_per_epoch:,} steps of {self.batch_size:,} an epoch, "
            f"{left_out:,} rows left out each epoch"
        )

    def next_batch(self) -> tuple[int, list[int]]:
        """The epoch of the next batch and its row numbers; moves on by one step."""
        if self._order is None:
            self._order = self._order_of(self.epoch)
        start = self.step_in_epoch * self.batch_size
        epoch, rows = self.epoch, self._order[start : start + self.batch_size].tolist()
        self.step_in_epoch += 1
        if self.step_in_epoch == self.steps_per_epoch:
            self.epoch, self.step_in_epoch, self._order = self.epoch + 1, 0, None
        return epoch, rows

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on."""
        return {**self._identity(), "epoch": self.epoch, "step_in_epoch": self.step_in_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position. Raises ValueError when the order there would not be the order here."""
        expected = {*self._identity(), "epoch", "step_in_epoch"}
        if set(state) != expected:
            raise ValueError(f"data position: expected the keys {sorted(expected)}, found {sorted(state)}")
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise ValueError(
                    f"cannot resume the data: {name} was {state[name]!r} when the checkpoint was written and is now "
                    f"{mine!r}, so rows would be repeated or skipped. Start with the old value, or start a new run"
                )
        if state["epoch"] < 0 or not 0 <= state["step_in_epoch"] < self.steps_per_epoch:
            raise ValueError(
                f"data position: epoch {state['epoch']}, step {state['step_in_epoch']} is not a position among "
                f"{self.steps_per_epoch} steps an epoch"
            )
        self.epoch, self.step_in_epoch, self._order = state["epoch"], state["step_in_epoch"], None


class PromptSource:
    """A source of batches for a flow: calling it gives the next `DataProto` of `batch_size` prompts, for ever.

    Each row gets the `uid` "<epoch>:<row>", the same in every run and the only one of its kind within an epoch. The
    attributes epoch, step_in_epoch and steps_per_epoch, and `describe`, `state_dict`, `load_state_dict` are those of
    `ResumableSampler`.

    dataset: anything with `len()` and `dataset[i] -> dict`. collate: a list of such dicts -> DataProto.
    """

    def __init__(
        self,
        dataset: Sequence[dict[str, Any]],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        collate: Callable[[list[dict[str, Any]]], DataProto],
    ):
        self.dataset = dataset
        self.collate = collate
        self.sampler = ResumableSampler(len(dataset), batch_size, seed=seed, shuffle=shuffle)

    def __call__(self) -> DataProto:
        epoch, rows = self.sampler.next_batch()
        return self.collate([{**self.dataset[row], "uid": f"{epoch}:{row}"} for row in rows])

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def step_in_epoch(self) -> int:
        return self.sampler.step_in_epoch

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def describe(self) -> str:
        return self.sampler.describe()

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
