"""Datasets of the Hugging Face Hub, and folders that the `datasets` library reads.

An entry of `data.train_files` is NAME, NAME@CONFIG, NAME:SPLIT or NAME@CONFIG:SPLIT, where NAME is OWNER/NAME on the
hub or a folder: one that `save_to_disk` wrote, or one with data files. The split is `train` if none is given (`test`
for `data.val_files`).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.data.known import CONFIGS, KNOWN
from verl.data.readers import RowTable
from verl.utils.data_names import DataName, source_name
from verl.utils.paths import expanded, resolved

logger = logging.getLogger("verl.data")

_TIMEOUT = 10.0  # seconds to wait for a reply of the hub
_SAVED = ("dataset_dict.json", "state.json")  # files of a folder that `save_to_disk` wrote


class _Converted(Sequence):
    """Rows of a known dataset, converted when they are read."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], convert: Callable[..., dict[str, Any]], name: DataName):
        self._rows, self._convert, self._name = rows, convert, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self._convert(self._rows[index], self._name.split, index)
        except ValueError as error:
            raise ValueError(f"{self._name}, row {index} (the first is 0): {error}") from error


def open_dataset(entry: str | Path) -> RowTable:
    """Load a hub dataset or a folder. The rows are memory-mapped by `datasets`.

    Args:
        entry: see the module docstring.

    Raises:
        ValueError: the library is not installed, the hub is not reachable, or there is no such dataset, configuration
            or split.
    """
    requested = DataName.parse(entry)
    config = requested.config or CONFIGS.get(requested.path)
    name = DataName(requested.path, config, requested.split or "train")
    meaning = "a folder" if name.is_folder else "no file, and read as the name of a hub dataset"
    library = _library(f"{name.path} is {meaning}", "give a .parquet, .jsonl, .json or .csv file")
    if not name.is_folder:
        check_hub("dataset", name.path)
    logger.info("loading %s", name)
    try:
        rows = _load(library, name)
    except (OSError, ValueError, KeyError, library.exceptions.DatasetsError) as error:
        hint = f" (read from the folder {resolved(name.path)}, not from the hub)" if name.is_folder else ""
        raise ValueError(f"{name}: the dataset cannot be loaded{hint}: {type(error).__name__}: {error}") from error
    rows = _with_stored_images(library, rows)
    if convert := KNOWN.get(name.path):
        logger.info("%s: prompt and ground truth as examples/data_preprocess makes them", name)
        rows = _Converted(rows, convert, name)
    return RowTable(rows, name=str(name), source=source_name(entry))


class _Mapped(RowTable):
    """Rows that `datasets` memory-maps."""

    def column(self, name: str) -> Iterable[Any]:
        return self._rows[name]


def stream_parquet(path: Path) -> RowTable:
    """A parquet file whose rows stay on disk: `datasets` memory-maps a copy in its cache. Raises ValueError."""
    library = _library(f"{path} is streamed (data.streaming)", "set data.streaming=false")
    try:
        rows = library.load_dataset("parquet", data_files=str(path), split="train")
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        raise ValueError(f"{path}: not a valid parquet file: {error.__cause__ or error}") from error
    return _Mapped(_with_stored_images(library, rows), name=str(path), source=source_name(path))


def _library(problem: str, fix: str) -> ModuleType:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(f"{problem}, which needs the package {error.name}: pip install datasets, or {fix}") from error
    return datasets


def _load(library: ModuleType, name: DataName) -> Any:
    path = expanded(name.path)
    if not name.is_folder:
        return library.load_dataset(name.path, name.config, split=name.split)
    if not any((path / file).is_file() for file in _SAVED):
        return library.load_dataset(str(path), name.config, split=name.split)
    dataset = library.load_from_disk(str(path))
    if not isinstance(dataset, Mapping):  # one split, which has no name
        return dataset
    if name.split not in dataset:
        raise ValueError(f"expected one of the splits {', '.join(dataset)}, found {name.split!r}")
    return dataset[name.split]


def _with_stored_images(library: ModuleType, rows: Any) -> Any:
    """The rows with images as bytes or paths: `datasets` would decode them whenever a row is read."""
    if not isinstance(rows, library.Dataset):
        return rows
    for name, feature in rows.features.items():
        stored = library.Image(decode=False)
        if isinstance(feature, library.Image):
            rows = rows.cast_column(name, stored)
        elif isinstance(getattr(feature, "feature", None), library.Image):  # a list of images
            rows = rows.cast_column(name, type(feature)(stored))
    return rows


def check_hub(kind: str, name: str) -> None:
    """Check that the hub has a model or dataset. Without this, the retries of the libraries take minutes.

    Args:
        kind: "model" or "dataset".

    Raises:
        ValueError: it has none of this name, or does not answer.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_TIMEOUT)
    except Exception as error:
        problem = (
            f"{constants.ENDPOINT} is not reachable ({type(error).__name__}: {error}). HF_HUB_OFFLINE=1 reads a copy "
            "that is in the cache; a file or folder needs no network"
        )
        if isinstance(error, RepositoryNotFoundError):
            problem = f"no {kind} at {constants.ENDPOINT} (of a private one: log in with `hf auth login`)"
        raise ValueError(f"{name}: no file or folder of this name, and {problem}") from error
