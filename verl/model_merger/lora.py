"""LoRA adapters, merged into their base weights by peft.

W + (alpha / r) B A  (Hu et al. 2021, "LoRA", arXiv:2106.09685); alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023,
arXiv:2312.03732). A checkpoint of adapters contains no other weights:

actor/
  lora_adapter/adapter_model.safetensors   peft's names; also a value head that was trained
  lora_adapter/adapter_config.json         alpha, and the base model
  huggingface/                             config and tokenizer
"""

from pathlib import Path
from typing import Any

import torch

from verl.checkpoints.safetensors_files import SafetensorsFiles
from verl.engines.quantization import QUANTIZED, rounded
from verl.model_merger.huggingface import build, describe, main_dtype
from verl.modeling.huggingface import VALUE_HEADS
from verl.utils.paths import read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

#: prefix of module names in peft's files
PREFIX = "base_model.model."


def recorded_base(folder: Path) -> str | None:
    """Return the base model named in the adapter config, a path or a HuggingFace id."""
    path = folder / ADAPTER_CONFIG
    return read_json(path).get("base_model_name_or_path") if path.is_file() else None


class MergedAdapters:
    """The weights of a model with its adapters merged, in memory until they are read: each can be read once.

    Args:
        folder: the adapters, written by peft.
        base: the HuggingFace folder of their base model.
        config_folder: with the config of the trained model.

    Attributes:
        is_untrained: whether all adapters are zero, as before the first step, and no module was trained in full.

    Raises:
        ValueError: peft is not installed, there is no alpha, or the adapters do not match the model.
    """

    def __init__(self, folder: Path, base: Path, config_folder: Path, trust_remote_code: bool):
        path = folder / ADAPTER_CONFIG
        if not (alpha := read_json(path).get("lora_alpha") if path.is_file() else None):
            scales = "which scales the adapters"  # a guess would scale them differently than in training
            raise ValueError(f"{path}: expected the lora_alpha of the training run, {scales}, found {alpha}")
        files, weights = SafetensorsFiles(folder, ADAPTER_WEIGHTS), SafetensorsFiles(base)
        adapters = {name: files.read(name) for name in files.names() if ".lora_" in name}
        trained = {name.removeprefix(PREFIX): files.read(name) for name in files.names() if name not in adapters}
        replaced = {name.rpartition(".")[0] for name in trained}
        if replaced.intersection(VALUE_HEADS):  # a critic from a language model has a value head instead of its head
            replaced.add("lm_head")
        names = [name for name in weights.names() if name.rpartition(".")[0] not in replaced]
        model = describe(config_folder, [*names, *trained], trust_remote_code)
        tensors = {name: weights.read(name) for name in names} | trained
        module = build(model, None, tensors, main_dtype(tensors.values()))
        del tensors
        for name in read_json(folder / QUANTIZED) if (folder / QUANTIZED).is_file() else ():
            parameter = module.get_parameter(name)  # training quantized it
            parameter.data = rounded(parameter.data)
        self.is_untrained = not trained and not any(
            tensor.count_nonzero() for name, tensor in adapters.items() if name.endswith(".lora_B.weight")
        )
        self._tensors = _merged(module, adapters, folder)

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors.pop(name)


def _merged(module: Any, adapters: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model after the adapters, with the settings of a folder, are merged into it."""
    try:
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    except ModuleNotFoundError as error:
        raise ValueError("merging LoRA adapters needs the package peft: pip install peft") from error
    settings = LoraConfig.from_pretrained(folder)
    settings.task_type = settings.modules_to_save = settings.base_model_name_or_path = None
    settings.inference_mode = False
    try:
        adapted = get_peft_model(module, settings)
        set_peft_model_state_dict(adapted, adapters)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the adapters do not match the model: {error}") from error
    loaded = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if differing := sorted(loaded.keys() ^ adapters.keys()):
        raise ValueError(f"the adapter is incomplete, or not one of this model: {differing[0]}")
    for name, tensor in loaded.items():  # peft leaves out those of layers with another name in the model's files
        tensor.data.copy_(adapters[name])
    state = adapted.merge_and_unload().state_dict()
    return {name: tensor for name, tensor in state.items() if name not in module.all_tied_weights_keys}
