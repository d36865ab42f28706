"""Names of training data: a file, a folder, or a dataset of the Hugging Face Hub."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from verl.utils.paths import expanded, resolved

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
"""Suffixes of data files."""

_ENTRY = re.compile(r"(?P<path>.+?)(?:@(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?", re.DOTALL)
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SPLIT_FILE = re.compile(r"(train|test|validation|valid|val|dev|eval)([-_]\d.*)?", re.IGNORECASE)


@dataclass(frozen=True)
class DataName:
    """An entry of `data.train_files` that is not a file: PATH, PATH@CONFIG, PATH:SPLIT or PATH@CONFIG:SPLIT.

    Attributes:
        path: a folder, or the name of a dataset on the hub.
        config: the configuration of the dataset (`main` of openai/gsm8k); None: its default.
        split: the split; None: not given.
    """

    path: str
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, entry: str | Path) -> "DataName":
        """Split an entry into its parts. An existing folder is a path as a whole."""
        text = str(entry)
        if os.path.isdir(expanded(text)):
            return cls(text)
        match = _ENTRY.fullmatch(text)
        return cls(match["path"], match["config"], match["split"])

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(expanded(self.path))

    @property
    def is_hub_name(self) -> bool:
        """Whether the path has the form OWNER/NAME and is not a data file."""
        return _HUB.fullmatch(self.path) is not None and not is_data_file(self.path)

    def __str__(self) -> str:
        config = f"@{self.config}" if self.config else ""
        return f"{self.path}{config}" + (f":{self.split}" if self.split else "")


def is_data_file(entry: str | Path) -> bool:
    """Whether an entry ends with a suffix of data files."""
    return Path(entry).suffix.lower() in SUFFIXES


def with_split(entry: str, split: str) -> str:
    """Add a split to the name of a hub dataset or folder that has none. Files are returned unchanged."""
    name = DataName.parse(entry)
    if is_data_file(entry) or name.split or not (name.is_folder or name.is_hub_name):
        return entry
    return str(DataName(name.path, name.config, split))


def source_name(entry: str | Path) -> str:
    """The data source of rows without one: the name of their file without suffix, or of its folder if the file is named
    after a split (train.parquet, test-00000-of-00001.parquet); OWNER/NAME of a hub dataset; the name of a folder."""
    if not is_data_file(entry):
        name = DataName.parse(entry)
        return resolved(name.path).name if name.is_folder else name.path
    stem = Path(entry).stem
    return (resolved(entry).parent.name or stem) if _SPLIT_FILE.fullmatch(stem) else stem
