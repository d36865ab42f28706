"""LoRA adapters, merged into their base weights by peft.

W + (alpha / r) B A  (Hu et al. 2021, "LoRA", arXiv:2106.09685); alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023,
arXiv:2312.03732). The weight files do not contain alpha. It is read from the files in which trainers record it, and
must be given otherwise: a guess would scale the adapters differently than in training.

A checkpoint that contains only adapters:

actor/
  lora_adapter/adapter_model.safetensors   peft's names; also a value head that was trained
  lora_adapter/adapter_config.json         alpha, and the base model
  huggingface/                             config and tokenizer

Other checkpoints contain adapters among the weights, under the names of a peft model.
"""

import re
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

_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.(?P<adapter>[^.]+)\.weight")
_FULLY_TRAINED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")


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
        quantized: base weights that training quantized.
    """

    base: dict[str, tuple[WeightSource, str]]
    trained: dict[str, tuple[WeightSource, str]]
    matrices: dict[str, tuple[WeightSource, str]]
    quantized: tuple[str, ...] = ()


def over_base(folder: Path, base: Path) -> Adapters:
    """The adapters of a folder that peft wrote, over the model of another folder."""
    files, weights = SafetensorsFolder(folder, ADAPTER_WEIGHTS), SafetensorsFolder(base)
    matrices = {name: (files, name) for name in files.names() if ".lora_" in name}
    trained = {name.removeprefix(PREFIX): (files, name) for name in files.names() if name not in matrices}
    replaced = {name.rpartition(".")[0] for name in trained}
    if "score" in replaced:  # a critic initialized from a language model has a value head instead of its head
        replaced.add("lm_head")
    kept = {name: (weights, name) for name in weights.names() if name.rpartition(".")[0] not in replaced}
    quantized = folder / QUANTIZED
    return Adapters(kept, trained, matrices, tuple(read_json(quantized)) if quantized.is_file() else ())


def among_weights(source: WeightSource) -> Adapters:
    """The adapters in the weights of a peft model. Raises ValueError for others than one LoRA adapter."""
    adapters, names = Adapters({}, {}, {}), set()
    for stored in source.names():
        name = stored.removeprefix(PREFIX)
        if match := _MATRIX.fullmatch(name):
            adapters.matrices[f"{PREFIX}{match['module']}.lora_{match['which']}.weight"] = source, stored
            names.add(match["adapter"])
        elif match := _FULLY_TRAINED.fullmatch(name):
            adapters.trained[f"{match['module']}.{match['rest']}"] = source, stored
        elif ".lora_" in name:
            raise ValueError(f"{stored}: this type of adapter is not supported: expected lora_A, lora_B")
        elif ".original_module." not in name:
            adapters.base[name.replace(".base_layer", "")] = source, stored
    if len(names) != 1:
        raise ValueError(f"expected one adapter in the checkpoint, found {sorted(names)}")
    return adapters


# ---- scaling --------------------------------------------------------------------------------------------------------


def lora_settings(folder: Path, alpha: float | None) -> dict[str, Any]:
    """Return the adapter config of a checkpoint, with alpha.

    A recorded alpha of 0 counts as missing, since older mergers wrote 0 for an unknown alpha.

    Args:
        alpha: The value given by the user; None to read it from the checkpoint.

    Raises:
        ValueError: If alpha is not recorded, or with different values.
    """
    path = folder / "lora_adapter" / ADAPTER_CONFIG
    config = read_json(path) if path.is_file() else {}
    if alpha is None:
        alpha = _recorded_alpha(folder, path, config)
    if not alpha > 0:
        raise ValueError(f"--lora_alpha: expected a positive number, found {alpha}")
    return config | {"lora_alpha": float(alpha)}


def _recorded_alpha(folder: Path, path: Path, config: dict[str, Any]) -> float:
    meta = folder / "lora_train_meta.json"
    recorded = {
        str(path): config.get("lora_alpha"),
        str(meta): read_json(meta).get("lora_alpha") if meta.is_file() else None,
    }
    positive = {file: value for file, value in recorded.items() if value}
    if len(set(positive.values())) != 1:
        problem = f"has different values: {positive}" if positive else f"is not recorded in any of {sorted(recorded)}"
        raise ValueError(
            f"the checkpoint contains LoRA adapters, which are scaled by lora_alpha, and lora_alpha {problem}; "
            "set the value of the training run: --lora_alpha N"
        )
    return next(iter(positive.values()))


# ---- the merged model -----------------------------------------------------------------------------------------------


class MergedAdapters(WeightSource):
    """The weights of a model with its adapters merged, in memory until they are read: each can be read once.

    Args:
        settings: of `lora_settings`.
        config_folder: with the HuggingFace config.

    Raises:
        ValueError: peft is not installed, or adapters that do not match the model.
    """

    def __init__(self, adapters: Adapters, settings: Mapping[str, Any], config_folder: Path, trust_remote_code: bool):
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
        self._tensors = _merged(module, matrices, settings)

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
