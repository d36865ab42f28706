"""The safetensors files of a HuggingFace folder: `model.safetensors`, or those of `model.safetensors.index.json`."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from verl.utils.paths import read_json

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def has_weights(folder: Path) -> bool:
    """Whether the folder contains the safetensors files of a model."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX).is_file()


class SafetensorsFiles:
    """The tensors of a folder, read one at a time.

    Args:
        single_file: Name of the file if there is no index.

    Raises:
        ValueError: If a file is missing.
        SafetensorError: If one is damaged.
    """

    def __init__(self, folder: Path, single_file: str = SINGLE_FILE):
        self.folder = folder
        if (folder / INDEX).is_file():
            names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        elif (folder / single_file).is_file():
            names = [single_file]
        else:
            raise ValueError(f"{folder} contains no weights: expected {single_file} or {INDEX}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder}: missing {', '.join(missing)}, listed in {INDEX}")
        self._files = {name: safe_open(folder / name, framework="pt") for name in names}
        self._tensor_files = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118

    def names(self) -> list[str]:
        return list(self._tensor_files)

    def slice_of(self, name: str) -> Any:
        """A tensor that is read when it is indexed, with `get_shape` and `get_dtype`."""
        return self._tensor_files[name].get_slice(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.slice_of(name).get_shape()) for name in self._tensor_files}

    def read(self, name: str) -> torch.Tensor:
        return self._tensor_files[name].get_tensor(name)
