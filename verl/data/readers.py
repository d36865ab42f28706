"""Readers of one data file: its rows as dicts.

JSON Lines are always read from disk by byte offsets. Other files are read into memory; `verl.data.hub` maps large
parquet files.
"""

import array
import csv
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from verl.data.bad_rows import parse_json
from verl.utils.data_names import source_name

_CHUNK = 1024  # rows converted from Arrow to Python objects at a time
_CSV_BLOCK = 1 << 26  # bytes of a CSV file that are parsed at a time; a row must fit into them
_BOM = b"\xef\xbb\xbf"  # some programs write a byte order mark
_LOCK = threading.RLock()  # for readers that are not thread-safe


class File(ABC):
    """The rows of one file or dataset: a reader. source: the data source of rows that name none."""

    columns: tuple[str, ...]
    has_union = False  # Arrow gives the structs of a list the union of their keys

    def __init__(self, path: Path, source: str | None = None):
        self.path, self.source = path, source_name(path) if source is None else source

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))  # iterating a torch dataset may not end

    def location(self, row: int) -> str:
        return f"{self.path}, row {row} (the first is 0)"

    def to_table(self) -> pa.Table:
        try:
            return pa.Table.from_pylist(list(self))
        except pa.ArrowException as error:
            raise ValueError(f"{self.path}: its values do not have one type per column: {error}") from error
        except (OverflowError, UnicodeEncodeError) as error:  # an integer of more than 64 bits, half a surrogate pair
            raise ValueError(f"{self.path}: a value has no type of Arrow: {error}") from error


class TableFile(File):
    """The rows of a parquet or CSV file as an Arrow table, converted to Python objects on access."""

    has_union = True

    def __init__(self, path: Path):
        super().__init__(path)
        is_csv = path.suffix.lower() == ".csv"
        self.table = _read_csv(path) if is_csv else _read_parquet(path)
        self.columns = tuple(self.table.column_names)

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.table.slice(row, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), _CHUNK):
            yield from self.table.slice(start, _CHUNK).to_pylist()

    def to_table(self) -> pa.Table:
        return self.table


class JsonLines(File):
    """The rows of a file with one JSON object per line. Only the offsets of the lines are in memory. All lines are
    parsed once. A missing key is None."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._file = path.open("rb", buffering=1 << 20)
        self._starts, self._sizes, self._lines = array.array("q"), array.array("q"), array.array("q")
        position = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._starts.append(position)
                self._sizes.append(len(line))
                self._lines.append(number)
            position += len(line)
        self.columns = tuple(dict.fromkeys(key for row in range(len(self)) for key in self._parse(row)))
        self._empty = dict.fromkeys(self.columns)

    def _parse(self, row: int) -> dict[str, Any]:
        # pread does not move the position of the file, which forked processes share
        line = os.pread(self._file.fileno(), self._sizes[row], self._starts[row])
        try:
            text = line.removeprefix(_BOM).decode().rstrip("\r\n")  # concatenated files have marks in the middle
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.location(row)}: expected UTF-8 text: {error}") from error
        value = parse_json(text, self.location(row), "one JSON object per line")
        return _check_object(value, self.location(row))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._empty | self._parse(row)

    def location(self, row: int) -> str:
        return f"{self.path}, line {self._lines[row]}"


class JsonList(File):
    """The rows of a JSON file that is a list of objects. A missing key is None."""

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected UTF-8 text: {error}") from error
        rows = parse_json(text, str(path), "a JSON list of objects")
        for index, row in enumerate(rows):
            _check_object(row, self.location(index))
        self.columns = tuple(dict.fromkeys(key for row in rows for key in row))
        empty = dict.fromkeys(self.columns)
        self._rows = [json.dumps(empty | row) for row in rows]  # text, so that every access returns a new object

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return json.loads(self._rows[row])


class RowTable(File):
    """Rows in memory (a sequence of dicts, such as a Hugging Face dataset) as a file.

    Args:
        rows: the rows.
        name: what errors call them; "": nothing.
        source: the data source of rows that name none.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str = "", source: str = "default"):
        super().__init__(Path(name or "dataframe"), source)
        self._rows, self._name, self.has_union = rows, name, not isinstance(rows, list)
        self.columns = tuple(rows[0]) if len(rows) else ()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        with _LOCK:
            return dict(self._rows[row])

    def location(self, row: int) -> str:
        return super().location(row) if self._name else f"row {row} (the first is 0)"


def open_file(path: Path) -> File:
    """Open a data file of any of the supported suffixes. Raises ValueError if it cannot be read."""
    is_json = path.suffix.lower() in (".json", ".jsonl")
    if is_json and not _is_list(path):
        return JsonLines(path)
    return JsonList(path) if is_json else TableFile(path)


def _read_parquet(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:  # `read_table` imports pandas, and makes columns of folders called key=value
            return file.read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a valid parquet file: {error}") from error


def _is_list(path: Path) -> bool:
    """Whether the first character of a JSON file is a bracket."""
    with path.open("rb") as file:
        while block := file.read(4096).removeprefix(_BOM):
            if text := block.lstrip():
                return text.startswith(b"[")
    return False


def _check_object(row: Any, location: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f'{location}: expected a JSON object such as {{"prompt": ...}}, found {type(row).__name__}')
    return row


def _read_csv(path: Path) -> pa.Table:
    """Read a CSV file: every value is text, and the first line has the names of the columns."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            names = next(csv.reader(file), [])
        if len(set(names)) < len(names):
            raise ValueError(f"{path}: expected columns with different names, found {', '.join(names)}")
        if not names:
            raise ValueError(f"{path}: the file has no rows")
        return pa.csv.read_csv(
            path,
            pa.csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK),  # with threads, errors do not name the row
            pa.csv.ParseOptions(newlines_in_values=True),
            pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
    except (pa.ArrowException, csv.Error) as error:
        raise ValueError(f"{path}: not a valid CSV file: {error}") from error
