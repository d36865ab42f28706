"""Rows of data files, and the order in which training reads them.

read_rows(files) -> Rows     parquet, jsonl, json
ResumableSampler             endless batches of row numbers, with exact resume
PromptSource                 the same as a source of `DataProto` batches: the first operator of a flow
"""

import bisect
import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.protocol import DataProto

logger = logging.getLogger("verl.data")

DEFAULT_SOURCE = "default"  # data source of the rows of a file that names none
_CHUNK = 1024  # rows converted from Arrow to Python objects at a time


class _ParquetFile:
    """The rows of one parquet file, converted to Python objects on access."""

    def __init__(self, path: Path):
        try:
            self.table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a valid parquet file: {error}") from error
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


class _JsonFile:
    """The rows of one JSON file: one object per line, or a list of objects. A missing key is None."""

    def __init__(self, path: Path):
        self.path = path
        try:
            text = path.read_text(encoding="utf-8-sig")  # some programs write a byte order mark
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected UTF-8 text: {error}") from error
        self.is_list = text.lstrip().startswith("[")
        self.positions: list[int] = []
        rows = self._parse_list(text) if self.is_list else self._parse_lines(text)
        self.columns = tuple(dict.fromkeys(key for row in rows for key in row))
        empty = dict.fromkeys(self.columns)
        self.rows = [empty | row for row in rows]

    def _parse_list(self, text: str) -> list[dict[str, Any]]:
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path}: expected a JSON list of objects: {error}") from error
        self.positions = list(range(len(rows)))
        return [self._check_object(row, i) for i, row in enumerate(rows)]

    def _parse_lines(self, text: str) -> list[dict[str, Any]]:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would also split inside JSON strings
            if not line.strip():
                continue
            self.positions.append(number)
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                what = f"expected one JSON object per line: {error.msg} at character {error.pos + 1}"
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
        return copy.deepcopy(self.rows[row])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(row) for row in self.rows)

    def where(self, row: int) -> str:
        position = self.positions[row]
        return f"{self.path}, row {position} (the first is 0)" if self.is_list else f"{self.path}, line {position}"

    def to_table(self) -> pa.Table:
        try:
            return pa.Table.from_pylist(self.rows)
        except pa.ArrowException as error:
            raise ValueError(f"{self.path}: its values do not have one type per column: {error}") from error


class RowTable:
    """Rows in memory (a sequence of dicts, such as a Hugging Face dataset) with the interface of a file."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.path, self._rows = Path("dataframe"), rows
        self.columns = tuple(rows[0]) if len(rows) else ()

    def to_table(self) -> pa.Table:
        return pa.Table.from_pylist(list(self))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(self._rows[row])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))  # iterating a torch dataset may not end

    def where(self, row: int) -> str:
        return f"row {row} (the first is 0)"


_READERS = {".parquet": _ParquetFile, ".jsonl": _JsonFile, ".json": _JsonFile}


class Rows(Sequence):
    """The rows of one or several files as dicts that all have the keys `columns`."""

    def __init__(self, files: Sequence["_ParquetFile | _JsonFile | RowTable"]):
        self.files = list(files)
        self.columns = self.files[0].columns
        self._ends = np.cumsum([len(file) for file in self.files]).tolist()

    def _locate(self, row: int) -> tuple[_ParquetFile | _JsonFile, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = bisect.bisect_right(self._ends, row)
        return self.files[number], row - (self._ends[number - 1] if number else 0)

    def __len__(self) -> int:
        return self._ends[-1]

    def number(self, row: int) -> int:
        """The number of a row in the files; differs from `row` after `select`."""
        return row

    def __getitem__(self, row: int) -> dict[str, Any]:
        file, local = self._locate(row)
        return file[local]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            yield from file

    def select(self, indices: Sequence[int]) -> "SelectedRows":
        """The rows with these indices."""
        return SelectedRows(self, indices)

    def filter(self, function: Callable[[dict[str, Any]], bool], **kwargs: Any) -> "SelectedRows":
        """The rows for which `function(row)` is true. kwargs: those of Hugging Face's `Dataset.filter`, not used."""
        return self.select([index for index, row in enumerate(self) if function(row)])

    @property
    def names(self) -> str:
        """The paths of all files, for errors."""
        return ", ".join(str(file.path) for file in self.files)

    def where(self, row: int) -> str:
        """File, and row or line number, as shown in errors."""
        file, local = self._locate(row)
        return file.where(local)

    def to_table(self) -> pa.Table:
        """All rows as an Arrow table; columns of parquet files keep their types.

        Raises ValueError if a column of a JSON file has several types, or the files have different types.
        """
        tables = [file.to_table().select(self.columns) for file in self.files]
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise ValueError(f"{self.names}: columns of the same name have different types: {error}") from error


class SelectedRows(Rows):
    """Some of the rows of files, in the given order.

    Attributes:
        numbers: the row number in the files of each row.
    """

    def __init__(self, rows: Rows, indices: Sequence[int]):
        self.files, self.columns, self._rows = rows.files, rows.columns, rows
        self.numbers = [rows.number(index) for index in indices]
        self._indices = list(indices)

    def _locate(self, row: int) -> tuple[_ParquetFile | _JsonFile, int]:
        return self._rows._locate(self._indices[row])

    def number(self, row: int) -> int:
        return self.numbers[row]

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))


def row_count(files: str | Path | Sequence[str | Path]) -> int:
    """The number of rows of data files. For parquet files, only the metadata is read."""
    parquet = all(path.suffix.lower() == ".parquet" and path.is_file() for path in file_list(files))
    return sum(pq.read_metadata(path).num_rows for path in file_list(files)) if parquet else len(read_rows(files))


def check_batch_size(batch_size: int, rows: int) -> None:
    """Raise ValueError if a batch has more prompts than there are rows."""
    if batch_size > rows:
        raise ValueError(
            f"data.train_batch_size is {batch_size:,} prompts, but the training data has {rows:,} rows: set "
            f"data.train_batch_size={rows} or less, or add data"
        )


def file_list(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """One path or several -> a list of paths, `~` expanded. Raises ValueError otherwise, and for an empty list."""
    given = [files] if isinstance(files, str | Path) else files
    if not isinstance(given, Sequence) or not all(isinstance(f, str | Path) for f in given):
        raise ValueError(f"data files: expected a path or a list of paths, found {files!r}")
    if not given:
        raise ValueError("data files: expected a path or a list of paths, found an empty list")
    return [Path(f).expanduser() for f in given]


def read_rows(files: str | Path | Sequence[str | Path]) -> Rows:
    """Read .parquet, .jsonl and .json files as one sequence of rows.

    Raises:
        ValueError: a file that does not exist, has another suffix, has no rows or cannot be read (with the line), or
            files with different columns. Patterns such as `*.parquet` are not expanded.
    """
    opened: list[_ParquetFile | _JsonFile] = []
    for path in file_list(files):
        if not path.is_file():
            what = "a folder" if path.is_dir() else "no such file"
            raise ValueError(f"{path}: expected a data file, found {what}")
        if path.suffix.lower() not in _READERS:
            raise ValueError(
                f"{path}: expected a file with the suffix {', '.join(_READERS)}, found {path.suffix or 'no suffix'}"
            )
        file = _READERS[path.suffix.lower()](path)
        if len(file) == 0:
            raise ValueError(f"{path}: the file has no rows")
        if opened and set(file.columns) != set(opened[0].columns):
            missing = sorted(set(opened[0].columns) - set(file.columns))
            extra = sorted(set(file.columns) - set(opened[0].columns))
            raise ValueError(
                f"{path}: expected the same columns as {opened[0].path}; missing: {missing or 'none'}, "
                f"extra: {extra or 'none'}. Write all files with the same columns"
            )
        opened.append(file)
    return Rows(opened)


def rows_in_memory(given: Any) -> Rows | None:
    """Rows of a sequence of dicts; None if `given` is a path or a list of paths.

    A list is checked and copied: a key that a row does not have is None. Another sequence, such as a Hugging Face
    dataset, is read row by row.

    Raises:
        ValueError: an item of a list is not a dict.
    """
    if isinstance(given, str | Path | Mapping) or not isinstance(given, Sized) or not len(given):
        return None
    if isinstance(given[0], str | Path):
        return None
    if isinstance(given, list | tuple):
        for i, row in enumerate(given):
            if not isinstance(row, Mapping):
                raise ValueError(
                    f'row {i} (the first is 0): expected a dict such as {{"prompt": ..., "answer": ...}}, found '
                    f"{type(row).__name__}"
                )
        empty = dict.fromkeys(key for row in given for key in row)
        given = [empty | dict(row) for row in given]
    return Rows([RowTable(given)])


def extra_info_column(rows: Rows) -> str:
    """The column with the `extra_info` of a row: `extra_info`, or its misspelling `extro_info`."""
    if "extro_info" not in rows.columns:
        return "extra_info"
    if "extra_info" in rows.columns:
        logger.warning("%s: the column 'extro_info' is ignored, because there is a column 'extra_info'", rows.names)
        return "extra_info"
    logger.info("%s: the column 'extro_info' is read as 'extra_info'", rows.names)
    return "extro_info"


class ResumableSampler:
    """Endless batches of row numbers, shuffled in every epoch.

    The order of an epoch depends only on (seed, epoch). Rows that do not fill the last batch of an epoch are dropped;
    with `shuffle` these are different rows in each epoch.

    Attributes:
        epoch: the epoch of the next batch.
        step_in_epoch: the position of the next batch in its epoch.
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int = 0, shuffle: bool = True):
        if batch_size < 1:
            raise ValueError(f"batch size: expected int >= 1, found {batch_size}")
        check_batch_size(batch_size, num_rows)
        if seed < 0:
            raise ValueError(f"seed: expected int >= 0, found {seed}")
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.step_in_epoch = 0
        self._order: np.ndarray | None = None  # of the current epoch; None: not computed yet

    @property
    def steps_per_epoch(self) -> int:
        return self.num_rows // self.batch_size

    def describe(self, unit: str = "prompts") -> str:
        """Text such as "7,473 prompts: 29 steps of 256 per epoch, last 49 prompts dropped"."""
        dropped = self.num_rows % self.batch_size
        unit_dropped = unit.removesuffix("s") if dropped == 1 else unit
        steps = f"{self.num_rows:,} {unit}: {self.steps_per_epoch:,} steps of {self.batch_size:,} per epoch"
        return f"{steps}, last {dropped:,} {unit_dropped} dropped" if dropped else steps

    def next_batch(self) -> tuple[int, list[int]]:
        """The epoch and the row numbers of the next batch; advances by one step."""
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
        """The position, and everything that the order depends on."""
        return {**self._identity(), "epoch": self.epoch, "step_in_epoch": self.step_in_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position. Raises ValueError if the order of the rows differs from the saved one."""
        expected = {*self._identity(), "epoch", "step_in_epoch"}
        if set(state) != expected:
            raise ValueError(f"data position: expected the keys {sorted(expected)}, found {sorted(state)}")
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise ValueError(
                    f"cannot resume the data position: {name} is {mine!r}, but {state[name]!r} in the checkpoint, so "
                    f"rows would be repeated or skipped. Restore the old value, or start a new run"
                )
        if state["epoch"] < 0 or not 0 <= state["step_in_epoch"] < self.steps_per_epoch:
            raise ValueError(
                f"data position: epoch {state['epoch']}, step {state['step_in_epoch']} is not a position in "
                f"{self.steps_per_epoch} steps per epoch"
            )
        self.epoch, self.step_in_epoch, self._order = state["epoch"], state["step_in_epoch"], None


class PromptSource:
    """A source of batches for a flow: each call returns the next `DataProto` of `batch_size` prompts, endlessly.

    Each sample gets the `uid` "<epoch>:<row>", which is unique within an epoch and the same in every run.
    `epoch`, `step_in_epoch`, `steps_per_epoch`, `describe`, `state_dict` and `load_state_dict` are those of
    `ResumableSampler`.

    Args:
        dataset: any object with `len()` and `dataset[i] -> dict`.
        batch_size: prompts per batch.
        collate: a list of such dicts -> DataProto.
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

    def describe(self, unit: str = "prompts") -> str:
        return self.sampler.describe(unit)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
