"""Readers of one data file: its rows as dicts, in memory or from disk.

JSON Lines are always read from disk by byte offsets.
Parquet and CSV files are read into memory, or with streaming from a memory-mapped Arrow copy in the cache folder, which
gives any row in constant time.
"""

import array
import csv
import hashlib
import itertools
import json
import logging
import mmap
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from verl.data.bad_rows import parse_json
from verl.utils.data_names import source_name
from verl.utils.disk import cache_folder
from verl.utils.paths import resolved

logger = logging.getLogger("verl.data")

_CHUNK = 1024  # rows converted from Arrow to Python objects at a time, and per batch of an Arrow copy
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


class ParquetFile(File):
    """The rows of a parquet file in memory, converted to Python objects on access."""

    has_union = True

    def __init__(self, path: Path):
        super().__init__(path)
        self.table = _read_parquet(pq.read_table, path)
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


class ArrowCopy(File):
    """The rows of a parquet or CSV file, from a memory-mapped copy in the cache folder.

    The copy is written once, in chunks, and used again while the file is unchanged.
    """

    has_union = True

    def __init__(self, path: Path):
        super().__init__(path)
        self._copy = _ensure_copy(path)
        try:
            self._open()
        except (pa.ArrowException, OSError, ValueError) as error:
            logger.warning("%s is damaged (%s): it is written again", self._copy, error)
            self._copy.unlink()
            self._copy = _ensure_copy(path)
            self._open()

    def _open(self) -> None:
        with self._copy.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # rows are read in random order: no read-ahead
        self._reader = pa.ipc.open_file(pa.py_buffer(mapped))
        self.columns = tuple(self._reader.schema.names)
        sizes = [self._reader.get_batch(i).num_rows for i in range(self._reader.num_record_batches)]
        self._ends = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        batch = int(np.searchsorted(self._ends, row, side="right")) - 1
        with _LOCK:
            rows = self._reader.get_batch(batch)
        return rows.slice(row - int(self._ends[batch]), 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with pa.OSFile(str(self._copy)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield from reader.get_batch(number).to_pylist()

    def column(self, name: str) -> Iterable[Any]:
        for number in range(self._reader.num_record_batches):
            yield from self._reader.get_batch(number)[name].to_pylist()

    def to_table(self) -> pa.Table:
        return self._reader.read_all()


class RowTable(File):
    """Rows in memory (a sequence of dicts, such as a Hugging Face dataset or the rows of a CSV file) as a file.

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
    suffix = path.suffix.lower()
    if suffix in (".json", ".jsonl"):
        if _is_list(path):
            if streaming:
                logger.info("%s: a JSON list is read into memory; write JSON Lines (.jsonl) to stream it", path)
            return JsonList(path)
        return JsonLines(path, streaming)
    if streaming:
        return ArrowCopy(path)
    if suffix == ".parquet":
        return ParquetFile(path)
    return RowTable(list(_csv_rows(path)), name=str(path), source=source_name(path))


def count_rows(path: Path) -> int:
    """The number of rows of a data file, without keeping them. Of a parquet file, only the metadata is read."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(pq.read_metadata, path).num_rows
    if suffix == ".csv":
        return sum(1 for _ in _csv_rows(path))
    if _is_list(path):
        return len(JsonList(path))
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _read_parquet(read: Callable[[Path], Any], path: Path) -> Any:
    try:
        return read(path)
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


def _csv_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file, one at a time; every value is text, and the first line has the names of the columns.

    Raises:
        ValueError: a row does not have one value per column.
    """
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: expected columns with different names, found {', '.join(names)}")
            for values in reader:
                if len(values) != len(names) and values:
                    raise ValueError(
                        f"{path}, line {reader.line_num}: expected {len(names)} values ({', '.join(names)}), found "
                        f"{len(values)}: put values with commas or line breaks in double quotes"
                    )
                if values:
                    yield dict(zip(names, values))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected UTF-8 text: {error}") from error
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: not a valid CSV file: {error}") from error


# ---- the Arrow copy -------------------------------------------------------------------------------------------------


def _ensure_copy(path: Path) -> Path:
    """The Arrow copy of a file; it is written if there is none of the file as it is now."""
    state = path.stat()
    cache = cache_folder() / "rows"
    name = hashlib.sha256(str(resolved(path)).encode()).hexdigest()[:16]
    copy = cache / f"{name}-{state.st_size}-{state.st_mtime_ns}.arrow"
    if copy.is_file():
        return copy
    draft = copy.with_suffix(f".{os.getpid()}.draft")
    logger.info("%s: writing a copy for streaming to %s", path, copy)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob(f"{name}-*.arrow"):
            old.unlink(missing_ok=True)
        try:
            schema, batches = _batches(path)
            with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            draft.replace(copy)
        finally:
            draft.unlink(missing_ok=True)
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not a valid {path.suffix.lower()[1:]} file: {error}") from error
    except OSError as error:
        raise ValueError(
            f"{path}: no copy for streaming was written to {cache}: {error}. Set VERL_CACHE_DIR to a folder with "
            "enough space, or data.streaming=false"
        ) from error
    return copy


def _batches(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The rows of a file in batches, which are read when they are needed."""
    if path.suffix.lower() == ".parquet":
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        return file.schema_arrow, file.iter_batches(batch_size=_CHUNK, use_threads=False)
    rows = _csv_rows(path)
    first = next(rows, {})
    schema, rows = pa.schema([(name, pa.string()) for name in first]), itertools.chain([first] if first else [], rows)
    chunks = iter(lambda: list(itertools.islice(rows, _CHUNK)), [])
    return schema, (pa.RecordBatch.from_pylist(chunk, schema) for chunk in chunks)
