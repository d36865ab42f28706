"""LoRA adapters, merged into their base weights.

W + (alpha / r) B A  (Hu et al. 2021, "LoRA", arXiv:2106.09685); alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023,
arXiv:2312.03732). The weight files do not contain alpha. It is read from the files in which trainers record it, and
must be given otherwise: a guess would scale the adapters differently than in training.

A checkpoint that contains only adapters:

actor/
  lora_adapter/adapter_model.safetensors   peft's names; also a value head that was trained
  lora_adapter/adapter_config.json         alpha, and the base model
  huggingface/                             config and tokenizer
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.engines.quantization import QUANTIZED, rounded
from verl.model_merger.huggingface import build, describe, refuse_faults
from verl.model_merger.sources import SafetensorsFolder, Shape, TensorInfo, WeightSource
from verl.utils.paths import read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

#: prefix of module names in peft's files
PREFIX = "base_model.model."
_ADAPTER = "default"  # peft's default adapter name, which its files omit

_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.(?P<adapter>[^.]+)\.weight")
_FULLY_TRAINED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")


# ---- adapters over a base model -------------------------------------------------------------------------------------


def has_adapters(folder: Path) -> bool:
    """Whether the folder contains adapters written by peft."""
    return (folder / ADAPTER_WEIGHTS).is_file()


def recorded_base(folder: Path) -> str | None:
    """Return the base model named in the adapter config, a path or a HuggingFace id."""
    path = folder / ADAPTER_CONFIG
    return read_json(path).get("base_model_name_or_path") if path.is_file() else None


class LoadedModel(WeightSource):
    """The weights of a HuggingFace model under their names in memory. Needs host memory for all of them."""

    def __init__(self, folder: Path):
        model = describe(folder, (), trust_remote_code=False)
        module, faults = build(model, folder, None, model.config.dtype)
        refuse_faults(model, faults)
        self._tensors = {name: tensor for name, tensor in module.state_dict().items() if name not in model.tied}

    def names(self) -> list[str]:
        return list(self._tensors)

    def infos(self, expected: Mapping[str, Shape]) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class AdaptersOverBase(WeightSource):
    """The weights of a peft model under their names in memory: base weights and adapters."""

    def __init__(self, adapters: Path, base: Path):
        """Open both folders. If the adapted weights have other names in the files, the base model is loaded."""
        self.base = base
        files = SafetensorsFolder(adapters, ADAPTER_WEIGHTS)
        self._stored_in: dict[str, tuple[WeightSource, str]] = {}
        fully_trained: set[str] = set()
        for stored in files.names():
            module, _, last = stored.rpartition(".")
            if not module.endswith((".lora_A", ".lora_B")):  # a module that was trained in full
                fully_trained.add(module.removeprefix(PREFIX))
                module += ".modules_to_save"
            self._stored_in[f"{module}.{_ADAPTER}.{last}"] = files, stored
        quantized = adapters / QUANTIZED
        self._quantized = set(read_json(quantized)) if quantized.is_file() else set()
        weights: WeightSource = SafetensorsFolder(base)
        settings = read_json(adapters / ADAPTER_CONFIG)
        modules = {stored.removeprefix(PREFIX).partition(".lora_")[0] for stored in files.names() if ".lora_" in stored}
        used = self._quantized | {adapted_parameter(module, settings) for module in modules}
        if not used <= set(weights.names()):
            weights = LoadedModel(base)
        # a critic initialized from a language model has a value head instead of the language model head
        replaced = {*fully_trained, "lm_head"} if "score" in fully_trained else fully_trained
        self._stored_in |= {n: (weights, n) for n in weights.names() if n.rpartition(".")[0] not in replaced}

    def names(self) -> list[str]:
        return list(self._stored_in)

    def infos(self, expected: Mapping[str, Shape]) -> dict[str, TensorInfo]:
        infos = {id(folder): folder.infos({}) for folder, _ in self._stored_in.values()}
        return {name: infos[id(folder)][stored] for name, (folder, stored) in self._stored_in.items()}

    def read(self, name: str) -> torch.Tensor:
        folder, stored = self._stored_in[name]
        return rounded(folder.read(stored)) if name in self._quantized else folder.read(stored)


def adapted_parameter(module: str, config: Mapping[str, Any]) -> str:
    """HuggingFace name of the parameter that the adapter of a module changes.

    Adapters of several parameters of one module, such as experts, are nested: `target_parameters` begins with the
    innermost.

    Args:
        module: with ".base_layer" for each adapter around this one.
        config: adapter_config.json.
    """
    owner = module.replace(".base_layer", "")
    names = [name for name in config.get("target_parameters") or () if name.rpartition(".")[0] == owner]
    return names[-1 - module.count(".base_layer")] if names else f"{owner}.weight"


# ---- scaling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraSettings:
    """Scaling and layout of adapters.

    Attributes:
        alpha: Numerator of the scaling.
        rank_stabilized: Divide by sqrt(r) instead of r.
        transposed: The weights are (in, out) (`fan_in_fan_out`).
        config: adapter_config.json of the run, or empty.
    """

    alpha: float
    rank_stabilized: bool
    transposed: bool
    config: dict[str, Any]

    def scale(self, rank: int) -> float:
        """Return the factor of B A."""
        return self.alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def find_settings(folder: Path, alpha: float | None) -> LoraSettings:
    """Return the LoRA settings of a checkpoint.

    A recorded alpha of 0 counts as missing, since older mergers wrote 0 for an unknown alpha.

    Args:
        alpha: The value given by the user; None to read it from the checkpoint.

    Raises:
        ValueError: If alpha is not recorded, or with different values.
    """
    path = folder / "lora_adapter" / ADAPTER_CONFIG
    config = read_json(path) if path.is_file() else {}
    unsupported = [key for key in ("use_dora", "alpha_pattern") if config.get(key)]
    if unsupported:
        raise ValueError(f"{path} uses {' and '.join(unsupported)}, which is not supported")
    if alpha is None:
        alpha = _recorded_alpha(folder, path, config)
    if not alpha > 0:
        raise ValueError(f"--lora_alpha: expected a positive number, found {alpha}")
    rank_stabilized, transposed = bool(config.get("use_rslora")), bool(config.get("fan_in_fan_out"))
    return LoraSettings(float(alpha), rank_stabilized, transposed, config)


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


class MergedAdapters(WeightSource):
    """The weights of a peft model with its adapters merged, under the names of the base model."""

    def __init__(self, source: WeightSource, settings: LoraSettings):
        self.source, self.settings = source, settings
        self._inner: dict[str, str] = {}  # name without adapters -> name in the source
        self._matrices: dict[str, dict[str, str]] = {}  # parameter -> {"A": name in the source, "B": ...}
        self._fully_trained: set[str] = set()
        adapters: set[str] = set()
        for inner in source.names():
            name = inner.removeprefix(PREFIX)
            if match := _MATRIX.fullmatch(name):
                parameter = adapted_parameter(match["module"], settings.config)
                self._matrices.setdefault(parameter, {})[match["which"]] = inner
                adapters.add(match["adapter"])
            elif match := _FULLY_TRAINED.fullmatch(name):
                self._inner[f"{match['module']}.{match['rest']}"] = inner
                self._fully_trained.add(match["module"])
            elif ".lora_" in name:
                raise ValueError(f"{inner}: this type of adapter is not supported: expected lora_A, lora_B")
            elif ".original_module." not in name:
                self._inner[name.replace(".base_layer", "")] = inner
        if len(adapters) != 1:
            raise ValueError(f"expected one adapter in the checkpoint, found {sorted(adapters)}")
        for parameter, pair in self._matrices.items():
            if set(pair) != {"A", "B"} or parameter not in self._inner:
                raise ValueError(f"the adapter of {parameter} is incomplete: expected lora_A, lora_B and the weight")
        self._transposed: set[str] = set()  # parameters (in, out), or (experts, in, out)

    def names(self) -> list[str]:
        return list(self._inner)

    def infos(self, expected: Mapping[str, Shape]) -> dict[str, TensorInfo]:
        shapes = {inner: expected[name] for name, inner in self._inner.items() if name in expected}
        source_infos = self.source.infos(shapes)
        infos = {name: source_infos[inner] for name, inner in self._inner.items()}
        for parameter, pair in self._matrices.items():
            a, b, shape = source_infos[pair["A"]].shape, source_infos[pair["B"]].shape, infos[parameter].shape
            delta = (b[0], a[1]) if len(a) == len(b) == 2 and a[0] == b[1] else None
            if delta not in (shape[-2:], shape[:-3:-1]) or (len(shape) == 3 and a[0] % shape[0]):
                raise ValueError(f"the adapter of {parameter} (B {b}, A {a}) does not match its weight {shape}")
            if self.settings.transposed or (len(shape) == 3 and delta != shape[-2:]):
                self._transposed.add(parameter)
        owners = {name.rpartition(".")[0] for name in self._transposed}  # a square tensor is stored like the others
        self._transposed |= {name for name in self._matrices if name.rpartition(".")[0] in owners}
        return infos

    def read(self, name: str) -> torch.Tensor:
        base = self.source.read(self._inner[name])
        pair = self._matrices.get(name)
        if pair is None:
            return base
        a, b, experts = self.source.read(pair["A"]).float(), self.source.read(pair["B"]).float(), _experts(base)
        delta = torch.einsum("oke,eki->eoi", b.unflatten(1, (-1, experts)), a.unflatten(0, (experts, -1)))
        delta = (delta.mT if name in self._transposed else delta) * self.settings.scale(len(a) // experts)
        return (base.float() + delta.view(base.shape)).to(base.dtype)

    def is_untrained(self) -> bool:
        """Whether all adapters are zero, as before the first step, and no module was trained in full."""
        return not self._fully_trained and not any(
            self.source.read(pair["B"]).count_nonzero() for pair in self._matrices.values()
        )


def _experts(weight: torch.Tensor) -> int:
    """Number of experts of a fused weight; 1 for a matrix."""
    return len(weight) if weight.ndim == 3 else 1
