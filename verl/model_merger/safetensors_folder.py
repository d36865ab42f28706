"""Folders that are HuggingFace models already: what the engine of one device writes, a base model, a merged one."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from verl.model_merger.source import Shape, TensorInfo, WeightSource

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def has_weights(folder: Path) -> bool:
    """Whether the folder holds a model's safetensors files."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX).is_file()


def local_folder(name: str) -> Path | None:
    """Where a model with safetensors lies on this machine: a folder, or in HuggingFace's cache. Nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):  # not there; not a name of the hub either
            return None
    return folder if has_weights(folder) else None


class SafetensorsFolder(WeightSource):
    """`model.safetensors`, or the files that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path, single_file: str = SINGLE_FILE):
        """single_file: the name of the file where there is no index."""
        self.folder = folder
        if (folder / INDEX).is_file():
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        elif (folder / single_file).is_file():
            names = [single_file]
        else:
            raise ValueError(f"{folder} holds no weights: neither {single_file} nor {INDEX} is there")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} lists")
        self._files = {name: self._open(folder / name) for name in names}
        self._file_of = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118

    @staticmethod
    def _open(path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is torn or no safetensors file: {error}") from error

    def names(self) -> list[str]:
        return list(self._file_of)

    def infos(self, expected: Mapping[str, Shape]) -> dict[str, TensorInfo]:
        slices = {name: file.get_slice(name) for name, file in self._file_of.items()}
        return {name: TensorInfo(tuple(s.get_shape()), _DTYPES[s.get_dtype()]) for name, s in slices.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name)

    def read_again(self, name: str) -> torch.Tensor:
        """By rows, from a file opened anew."""
        (path,) = (self.folder / file for file, opened in self._files.items() if opened is self._file_of[name])
        with safe_open(path, framework="pt") as file:
            return file.get_slice(name)[...]
