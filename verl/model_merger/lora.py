"""LoRA adapters, merged into their base weights by peft.

W + (alpha / r) B A  (Hu et al. 2021, "LoRA", arXiv:2106.09685); alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023,
arXiv:2312.03732). A checkpoint of adapters contains no other weights:

actor/
  lora_adapter/adapter_model.safetensors   peft's names; also a value head that was trained
  lora_adapter/adapter_config.json         alpha, and the base model
  huggingface/                             config and tokenizer
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from verl.engines.quantization import QUANTIZED, rounded
from verl.model_merger.huggingface import build, describe
from verl.model_merger.sources import SafetensorsFolder, WeightSource, main_dtype
from verl.utils.paths import read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

#: prefix of module names in peft's files
PREFIX = "base_model.model."


def has_adapters(folder: Path) -> bool:
    """Whether the folder contains adapters written by peft."""
    return (folder / ADAPTER_WEIGHTS).is_file()


def recorded_base(folder: Path) -> str | None:
    """Return the base model named in the adapter config, a path or a HuggingFace id."""
    path = folder / ADAPTER_CONFIG
    return read_json(path).get("base_model_name_or_path") if path.is_file() else None


@dataclass
class Adapters:
    """Adapters and what they are merged into: name -> (source, name in it).

    Attributes:
        base: weights under the names of the base model.
        trained: those that were trained in full, which replace base weights.
        matrices: lora_A and lora_B, under the names of peft's files.
        settings: peft's adapter_config.json.
        quantized: base weights that training quantized.
    """

    base: dict[str, tuple[WeightSource, str]]
    trained: dict[str, tuple[WeightSource, str]]
    matrices: dict[str, tuple[WeightSource, str]]
    settings: Mapping[str, Any]
    quantized: tuple[str, ...] = ()


def over_base(folder: Path, base: Path) -> Adapters:
    """The adapters of a folder that peft wrote, over the model of another folder. Raises ValueError without alpha."""
    settings = read_json(folder / ADAPTER_CONFIG) if (folder / ADAPTER_CONFIG).is_file() else {}
    if not settings.get("lora_alpha"):  # a guess would scale the adapters differently than in training
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: expected the lora_alpha of the training run, which scales the adapters, found "
            f"{settings.get('lora_alpha')}"
        )
    files, weights = SafetensorsFolder(folder, ADAPTER_WEIGHTS), SafetensorsFolder(base)
    matrices = {name: (files, name) for name in files.names() if ".lora_" in name}
    trained = {name.removeprefix(PREFIX): (files, name) for name in files.names() if name not in matrices}
    replaced = {name.rpartition(".")[0] for name in trained}
    if "score" in replaced:  # a critic initialized from a language model has a value head instead of its head
        replaced.add("lm_head")
    kept = {name: (weights, name) for name in weights.names() if name.rpartition(".")[0] not in replaced}
    quantized = folder / QUANTIZED
    return Adapters(kept, trained, matrices, settings, tuple(read_json(quantized)) if quantized.is_file() else ())


# ---- the merged model -----------------------------------------------------------------------------------------------


class MergedAdapters(WeightSource):
    """The weights of a model with its adapters merged, in memory until they are read: each can be read once.

    Args:
        config_folder: with the HuggingFace config.

    Raises:
        ValueError: peft is not installed, or adapters that do not match the model.
    """

    def __init__(self, adapters: Adapters, config_folder: Path, trust_remote_code: bool):
        weights = adapters.base | adapters.trained
        model = describe(config_folder, weights, trust_remote_code)
        tensors = {name: source.read(stored) for name, (source, stored) in weights.items()}
        module = build(model, None, tensors, main_dtype(tensors.values()))
        del tensors
        for name in adapters.quantized:
            parameter = module.get_parameter(name)
            parameter.data = rounded(parameter.data)
        matrices = {name: source.read(stored) for name, (source, stored) in adapters.matrices.items()}
        #: whether all adapters are zero, as before the first step, and no module was trained in full
        self.is_untrained = not adapters.trained and not any(
            tensor.count_nonzero() for name, tensor in matrices.items() if name.endswith(".lora_B.weight")
        )
        self._tensors = _merged(module, matrices, adapters.settings)

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors.pop(name)


def _merged(module: Any, matrices: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a model after the adapters are merged into it."""
    try:
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    except ModuleNotFoundError as error:
        raise ValueError("merging LoRA adapters needs the package peft: pip install peft") from error
    ranks = {
        name.removeprefix(PREFIX).removesuffix(".lora_A.weight"): len(tensor)
        for name, tensor in matrices.items()
        if name.endswith(".lora_A.weight")
    }
    rank = max(set(ranks.values()), key=list(ranks.values()).count)
    derived = {
        "r": rank,
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "target_modules": sorted(ranks),
    }
    known = {each.name for each in fields(LoraConfig)}
    recorded = {key: value for key, value in settings.items() if key in known and value is not None}
    config = derived | recorded | {"task_type": None, "modules_to_save": None, "base_model_name_or_path": None}
    try:
        adapted = get_peft_model(module, LoraConfig(**config))
        set_peft_model_state_dict(adapted, dict(matrices))
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the adapters do not match the model: {error}") from error
    if differing := sorted(get_peft_model_state_dict(adapted, save_embedding_layers=False).keys() ^ matrices.keys()):
        raise ValueError(f"the adapter is incomplete, or not one of this model: {differing[0]}")
    state = adapted.merge_and_unload().state_dict()
    return {name: tensor for name, tensor in state.items() if name not in module.all_tied_weights_keys}
