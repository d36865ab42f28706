"""Checkpoints of a run that trained adapters alone: the adapters, and the model that they sit on, which lies elsewhere.

actor/
  lora_adapter/adapter_model.safetensors   peft's names; a value head that was trained, too
  lora_adapter/adapter_config.json         alpha, and where the weights under the adapters come from
  huggingface/                             config and tokenizer
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from verl.model_merger.safetensors_folder import SafetensorsFolder
from verl.model_merger.source import Shape, TensorInfo, WeightSource

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

#: what peft puts before a module's own names
PREFIX = "base_model.model."
_ADAPTER = "default"  # peft's name of an adapter that was given none; its files leave it out


def has_adapters(folder: Path) -> bool:
    """Whether a folder holds what peft writes."""
    return (folder / ADAPTER_WEIGHTS).is_file()


def recorded_base(folder: Path) -> str | None:
    """The model under the adapters, as their config names it: a path or a HuggingFace id."""
    path = folder / ADAPTER_CONFIG
    return json.loads(path.read_text()).get("base_model_name_or_path") if path.is_file() else None


class AdaptersOverBase(WeightSource):
    """The weights of a peft model, as they are named in its memory: those of the base, and the adapters over them."""

    def __init__(self, adapters: Path, base: Path):
        """adapters: `lora_adapter`. base: a HuggingFace folder with weights."""
        self.base = base
        files = SafetensorsFolder(adapters, ADAPTER_WEIGHTS)
        self._where: dict[str, tuple[SafetensorsFolder, str]] = {}
        whole: set[str] = set()
        for filed in files.names():
            module, _, last = filed.rpartition(".")
            if not module.endswith((".lora_A", ".lora_B")):  # trained whole beside the adapters
                whole.add(module.removeprefix(PREFIX))
                module += ".modules_to_save"
            self._where[f"{module}.{_ADAPTER}.{last}"] = files, filed
        under = SafetensorsFolder(base)
        # a critic that was made from a language model has a head of its own, and no use for the other one
        replaced = {*whole, "lm_head"} if "score" in whole else whole
        self._where |= {name: (under, name) for name in under.names() if name.rpartition(".")[0] not in replaced}

    def names(self) -> list[str]:
        return list(self._where)

    def infos(self, expected: Mapping[str, Shape]) -> dict[str, TensorInfo]:
        found = {id(folder): folder.infos({}) for folder, _ in self._where.values()}
        return {name: found[id(folder)][filed] for name, (folder, filed) in self._where.items()}

    def read(self, name: str) -> torch.Tensor:
        folder, filed = self._where[name]
        return folder.read(filed)

    def read_again(self, name: str) -> torch.Tensor:
        folder, filed = self._where[name]
        return folder.read_again(filed)
