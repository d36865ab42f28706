"""The trainer's state on disk: plain values as JSON, tensors as safetensors. Reading it cannot run code.

Supported types: None, bool, int, float, str, bytes, list, tuple, dict, tensors, arrays of numbers or of supported
values, numpy scalars, PIL images (as PNG) and batches. A type that JSON lacks is stored as an object with one key:
`{"$tuple": [...]}`.
"""

import base64
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from verl.protocol import DataProto
from verl.utils.paths import read_json

_PLAIN = (type(None), bool, int, float, str)


def save_state(state: Any, folder: Path, name: str) -> None:
    """Write `<name>.json` and `<name>.safetensors`. Raises ValueError with the path of a value that could not be read
    back."""
    writer = _Writer()
    text = json.dumps(writer.encode(state, name), indent=1)
    save_file(writer.tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def load_state(folder: Path, name: str) -> Any:
    """Read what `save_state` wrote. Raises ValueError if a file is missing or has other contents."""
    for end in ("json", "safetensors"):
        if not (folder / f"{name}.{end}").is_file():
            raise ValueError(f"{folder} has no {name}.{end}: it is not a checkpoint of this version")
    try:
        state = read_json(folder / f"{name}.json")
        return _Reader(load_file(folder / f"{name}.safetensors")).decode(state)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{folder}: {name}.json or {name}.safetensors is damaged: {error!r}") from error


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str) -> Any:
        """`value` as JSON; its tensors are added to `self.tensors`, named by their paths."""
        if isinstance(value, np.generic):
            return {"$number": [value.dtype.str, self.encode(value.item(), path)]}
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, list | tuple):
            items = [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, dict):
            return self._mapping(value, path)
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(value, path)}
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, DataProto):
            return {"$batch": self.encode(value.copy().to("cpu").__getstate__(), path)}
        if (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(value, pillow.Image):
            out = io.BytesIO()
            value.save(out, "PNG")
            return {"$image": base64.b64encode(out.getvalue()).decode()}
        raise ValueError(
            f"{path}: a {type(value).__name__} cannot be saved: supported are numbers, str, bytes, None, "
            "lists, tuples, dicts, tensors, arrays and batches"
        )

    def _mapping(self, value: dict, path: str) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        return {"$pairs": [[self.encode(k, path), self.encode(v, f"{path}.{k}")] for k, v in value.items()]}

    def _array(self, value: np.ndarray, path: str) -> Any:
        if value.dtype == object and value.ndim == 1:
            return {"$objects": [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]}
        if value.dtype.kind not in "biuf":
            raise ValueError(f"{path}: an array of dtype {value.dtype} cannot be saved: expected numbers")
        return {"$array": self._keep(torch.from_numpy(value.copy()), path)}

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        name = path if path not in self.tensors else f"{path}#{len(self.tensors)}"
        self.tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name


def _image(text: str) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return image.copy()


class _Reader:
    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._kinds: dict[str, Callable[[Any], Any]] = {
            "$number": lambda v: np.dtype(v[0]).type(self.decode(v[1])),
            "$bytes": base64.b64decode,
            "$image": _image,
            "$tuple": lambda items: tuple(map(self.decode, items)),
            "$pairs": lambda pairs: {self.decode(k): self.decode(v) for k, v in pairs},
            "$tensor": tensors.__getitem__,
            "$array": lambda name: tensors[name].numpy(),
            "$objects": self._objects,
            "$batch": self._batch,
        }

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        (kind, *_) = (*value, "")
        return self._kinds[kind](value[kind]) if kind.startswith("$") else {k: self.decode(v) for k, v in value.items()}

    def _objects(self, items: list) -> np.ndarray:
        array = np.empty(len(items), dtype=object)
        for i, item in enumerate(items):  # one by one: numpy would turn lists of equal length into columns
            array[i] = self.decode(item)
        return array

    def _batch(self, state: Any) -> DataProto:
        batch = DataProto()
        batch.__setstate__(self.decode(state))
        return batch
