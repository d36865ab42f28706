"""Readers of one data file: its rows as dicts.

JSON Lines are always read from disk by byte offsets. Other files are read into memory; `verl.data.hub` streams parquet.
"""

import array
import csv
import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from verl.data.bad_rows import parse_json
from verl.utils.data_names import source_name

logger = logging.getLogger("verl.data")

_CHUNK = 1024  # rows converted from Arrow to Python objects at a time
_CSV_BLOCK = 1 << 26  # bytes of a CSV file that are parsed at a time; a row must fit into them
_BOM = b"\xef\xbb\xbf"  # some programs write a byte order mark
_LOCK = threading.RLock()  # for readers that are not thread-safe
_SAMPLE = 1024  # lines of a streamed file that define its columns


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

    def column(self, name: str) -> Iterable[Any]:
        """The values of one column, without the cost of the others where the format allows it."""
        return (row[name] for row in self)

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

    def column(self, name: str) -> Iterable[Any]:
        return (value for chunk in self.table[name].chunks for value in chunk.to_pylist())

    def to_table(self) -> pa.Table:
        return self.table


class JsonLines(File):
    """The rows of a file with one JSON object per line. Only the offsets of the lines are in memory.

    A missing key is None. With `streaming` the first lines define the columns; otherwise all lines are parsed once.
    """

    def __init__(self, path: Path, streaming: bool = False):
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
        self.streaming = streaming
        checked = range(min(_SAMPLE, len(self))) if streaming else range(len(self))
        self.columns = tuple(dict.fromkeys(key for row in checked for key in self._parse(row)))
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
        record = self._parse(row)
        if self.streaming and (extra := record.keys() - self._empty.keys()):
            raise ValueError(
                f"{self.location(row)}: the keys {sorted(extra)} are not in the first {_SAMPLE:,} lines, which define "
                "the columns of a streamed file: add them to one of these lines, or set data.streaming=false"
            )
        return self._empty | record

    def column(self, name: str) -> Iterable[Any]:
        """By the parser of Arrow, which is several times faster, if all values are text."""
        read = pa.json.ReadOptions(use_threads=False, block_size=max(1 << 24, 2 * max(self._sizes, default=0)))
        schema = pa.schema([(name, pa.string())])
        parse = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        try:
            values = pa.json.read_json(self.path, read, parse)[name]
        except pa.ArrowException:  # other values, or invalid rows, which the other parser names
            return super().column(name)
        return values.to_pylist() if len(values) == len(self) else super().column(name)

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


def open_file(path: Path, streaming: bool) -> File:
    """Open a data file of any of the supported suffixes. Raises ValueError if it cannot be read."""
    is_json = path.suffix.lower() in (".json", ".jsonl")
    if is_json and not _is_list(path):
        return JsonLines(path, streaming)
    if streaming:
        logger.info("%s is read into memory; write JSON Lines (.jsonl) or parquet to stream it", path)
    return JsonList(path) if is_json else TableFile(path)


def _read_parquet(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
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
