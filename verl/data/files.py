"""Rows of one or several data files.

read_rows(files) -> Rows     parquet, jsonl, json, csv; folders and datasets of the Hugging Face Hub
"""

import bisect
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.data.readers import File, RowTable, open_file
from verl.registry import did_you_mean
from verl.utils.data_names import SUFFIXES, DataName, is_data_file
from verl.utils.packages import is_installed
from verl.utils.paths import expanded

logger = logging.getLogger("verl.data")

DEFAULT_SOURCE = "default"
"""Data source of rows that name none, in evaluation."""

MAPPED_BYTES = 1 << 30
"""Parquet files of more bytes are memory-mapped by the package `datasets`, if it is installed."""


class Rows(Sequence):
    """The rows of one or several files as dicts that all have the keys `columns`."""

    def __init__(self, files: Sequence[File]):
        self.files = list(files)
        self.columns = self.files[0].columns
        self._ends = np.cumsum([len(file) for file in self.files]).tolist()

    def _locate(self, row: int) -> tuple[File, int]:
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
        return _without_union(file[local]) if file.has_union else file[local]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            yield from map(_without_union, file) if file.has_union else file

    def by_file(self) -> list[np.ndarray]:
        """The numbers of the rows of each file."""
        numbers = self._file_numbers(np.arange(len(self)))
        return [np.flatnonzero(numbers == number) for number in range(len(self.files))]

    def _file_numbers(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._ends, rows, side="right")

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

    def check_column(self, column: str, key: str, purpose: str = "") -> str:
        """The name of a column, which the setting data.`key` has. Raises ValueError if there is no such column."""
        if column not in self.columns:
            fix = did_you_mean(column, self.columns)
            raise ValueError(f"{self.names}: no column {column!r}{purpose} (data.{key}): {fix}")
        return column

    def source(self, row: int) -> str:
        """The data source of a row that names none: the name of its file or dataset."""
        return self._locate(row)[0].source

    def folder(self, row: int) -> Path:
        """The folder of the file of a row, where relative paths in it start; that of rows in memory is the current."""
        return self._locate(row)[0].path.parent

    def location(self, row: int) -> str:
        """File, and row or line number, as shown in errors."""
        file, local = self._locate(row)
        return file.location(local)

    def to_table(self) -> pa.Table:
        """All rows as an Arrow table; columns of parquet files keep their types. Raises ValueError if a column of a
        JSON file has several types, or the files have different types."""
        tables = [file.to_table().select(self.columns) for file in self.files]
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise ValueError(f"{self.names}: columns of the same name have different types: {error}") from error


def _without_union(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose chat messages and tools have no null keys: Arrow gives each of them the keys of all."""
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and {"role", "function"} & value[0].keys():
            row[name] = _without_nulls(value)
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


class SelectedRows(Rows):
    """Some of the rows of files, in the given order."""

    def __init__(self, rows: Rows, indices: Sequence[int]):
        self.files, self.columns, self._rows = rows.files, rows.columns, rows
        # 8 bytes per row; a list of ints would need 36
        self._indices = np.fromiter(indices, dtype=np.int64, count=len(indices))

    def _locate(self, row: int) -> tuple[File, int]:
        return self._rows._locate(int(self._indices[row]))

    def _file_numbers(self, rows: np.ndarray) -> np.ndarray:
        return self._rows._file_numbers(self._indices[rows])

    def number(self, row: int) -> int:
        return self._rows.number(int(self._indices[row]))

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))


def file_list(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """One path or several -> a list of paths, `~` expanded. Raises ValueError otherwise, and for an empty list."""
    paths = [files] if isinstance(files, str | Path) else files
    if not isinstance(paths, Sequence) or not all(isinstance(f, str | Path) for f in paths):
        raise ValueError(f"data files: expected a path or a list of paths, found {files!r}")
    if not paths:
        raise ValueError("data files: expected a path or a list of paths, found an empty list")
    return [expanded(f) for f in paths]


def read_rows(files: str | Path | Sequence[str | Path]) -> Rows:
    """Read files, folders and hub datasets as one sequence of rows.

    Args:
        files: .parquet, .jsonl, .json or .csv files; folders and names as `verl.data.hub` describes.

    Raises:
        ValueError: a file that does not exist, has another suffix, has no rows or cannot be read (with the line), or
            files with different columns. Patterns such as `*.parquet` are not expanded.
    """
    opened: list[File] = []
    for path in file_list(files):
        file = _open(path)
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


def _open(path: Path) -> File:
    """A data file, a folder or a dataset of the hub. Raises ValueError for none of these."""
    if not os.path.isfile(path):
        from verl.data.hub import open_dataset

        name = DataName.parse(path)
        if not (name.is_folder or name.is_hub_name):
            raise ValueError(f"{path}: expected a data file, found no such file")
        return open_dataset(path)
    if not is_data_file(path):
        suffix = path.suffix or "no suffix"
        raise ValueError(f"{path}: expected a file with the suffix {', '.join(SUFFIXES)}, found {suffix}")
    if path.suffix.lower() == ".parquet" and path.stat().st_size > MAPPED_BYTES and is_installed("datasets"):
        from verl.data.hub import map_parquet

        return map_parquet(path)
    return open_file(path)


def rows_in_memory(data: Any) -> Rows | None:
    """Rows of a sequence of dicts; None for paths, and for everything else that `file_list` rejects. A list is checked
    and copied (a missing key is None); another sequence, such as a Hugging Face dataset, is read row by row. Raises
    ValueError if an item of a list is not a dict."""
    if isinstance(data, str | Path | Mapping) or not isinstance(data, Sized) or not len(data):
        return None
    if isinstance(data[0], str | Path):
        return None
    return Rows([RowTable(_with_all_keys(data) if isinstance(data, list | tuple) else data)])


def _with_all_keys(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Copies of the rows in which every row has the keys of all."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(
                f'row {number} (the first is 0): expected a dict such as {{"prompt": ..., "answer": ...}}, found '
                f"{type(row).__name__}"
            )
    empty = dict.fromkeys(key for row in rows for key in row)
    return [empty | dict(row) for row in rows]


def rows_digest(rows: Rows) -> str:
    """A digest of rows in memory. Of many, at most 10,000 evenly spaced ones are read."""
    digest = hashlib.sha256(str(len(rows)).encode())
    for row in (rows[i] for i in range(0, len(rows), 1 + len(rows) // 10_000)):
        # the type stands for a value that is not JSON: its text may contain an address in memory
        digest.update(json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True).encode())
    return digest.hexdigest()
