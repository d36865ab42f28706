"""The weights of a HuggingFace folder, with the names and shapes of transformers' modules."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from verl.checkpoints.safetensors_files import SafetensorsFiles
from verl.checkpoints.shard_files import Region
from verl.engines.megatron.layout import Conversion
from verl.modeling.huggingface import model_source

#: heads of another kind of the same model
_HEADS = ("lm_head", "score", "classifier", "v_head")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
#: files of Mixtral have names of their own
_MIXTRAL = {".block_sparse_moe.": ".mlp.", ".w1.weight": ".gate_proj.weight", ".w3.weight": ".up_proj.weight"}
_MIXTRAL |= {".w2.weight": ".down_proj.weight"}

#: (part, expert), for a tensor that is made of one tensor for each expert; ("", 0) for others
_Key = tuple[str, int]


class WeightFiles:
    """The tensors of a HuggingFace folder, read one box at a time.

    Args:
        path: a folder, or an id of a hub.

    Raises:
        ValueError: there are no safetensors files.
    """

    def __init__(self, path: str):
        self.path = path
        folder = Path(model_source(path))
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
        self._files = SafetensorsFiles(folder)
        self._stored: dict[str, dict[_Key, str]] = {}  # name of a module's tensor -> names in the files
        for name in self._files.names():
            source, key = _source_of(name)
            self._stored.setdefault(source, {})[key] = name

    def __contains__(self, source: str) -> bool:
        return source in self._stored

    def check_names(self, table: Iterable[Conversion]) -> None:
        """Raise ValueError if a weight is missing or not used. A value head may be missing."""
        used = {source: shape for conversion in table for source, shape in zip(conversion.sources, conversion.shapes)}
        missing = [x for x in used if not self._is_complete(x, used[x]) and not x.startswith("score.")]
        spare = [source for source in self._stored if source not in used]
        unknown = [x for x in spare if x.rpartition(".")[2] != "inv_freq" and x.split(".")[0] not in _HEADS]
        if unknown or missing:
            raise ValueError(
                f"{self.path!r}: expected the weights of its config.json, missing {sorted(missing)[:5]}, not used "
                f"{sorted(unknown)[:5]}"
            )

    def _is_complete(self, source: str, shape: tuple[int, ...]) -> bool:
        stored = self._stored.get(source, {})
        if ("", 0) in stored:
            return True
        return bool(stored) and set(stored) == {(part, i) for part in _parts(source) for i in range(shape[0])}

    def read(self, region: Region) -> torch.Tensor:
        """Values of a box. Raises ValueError if the tensor has another shape."""
        stored = self._stored[region.source]
        if ("", 0) in stored:
            return self._slice(stored["", 0], region.full, region.slices)
        parts, experts = _parts(region.source), range(region.full[0])[region.slices[0]]
        length = region.full[1] // len(parts)
        part, start = divmod(region.offset[1], length)
        within = (slice(start, start + region.shape[1]), region.slices[2])
        names = [stored[parts[part], i] for i in experts]
        return torch.stack([self._slice(name, (length, region.full[2]), within) for name in names])

    def _slice(self, name: str, full: tuple[int, ...], slices: tuple[slice, ...]) -> torch.Tensor:
        tensor = self._files.slice_of(name)
        if tuple(tensor.get_shape()) != full:
            raise ValueError(f"{self.path!r}: {name} has the shape {tensor.get_shape()}, expected {list(full)}")
        return tensor[slices]


def _parts(source: str) -> tuple[str, ...]:
    """The tensors of an expert that make up its part of a tensor, in their order."""
    return ("gate", "up") if source.endswith(".gate_up_proj") else ("down",)


def _source_of(name: str) -> tuple[str, _Key]:
    """The tensor of a module that a tensor in a file is a part of."""
    if not name.startswith("model.") and name.split(".")[0] not in _HEADS:
        name = f"model.{name}"  # written by a model without a head
    if ".block_sparse_moe." in name:
        for theirs, ours in _MIXTRAL.items():
            name = name.replace(theirs, ours)
    if (match := _EXPERT.fullmatch(name)) is None:
        return name, ("", 0)
    return match[1] + ("down_proj" if match[3] == "down" else "gate_up_proj"), (match[3], int(match[2]))
