"""LoRA in a checkpoint: adapters added to the weights they sit on, or exported as peft stores them.

W + (alpha / r) B A  (Hu et al. 2021, "LoRA", arXiv 2106.09685); alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023, arXiv
2312.03732). The files with the weights do not hold alpha. It is looked for where trainers write it, and asked for when
it is not there: a guess would be a model of another strength than the one that was trained.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.model_merger.adapter_folder import ADAPTER_CONFIG, PREFIX
from verl.model_merger.checkpoint import Checkpoint
from verl.model_merger.source import Shape, TensorInfo, WeightSource

_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.(?P<adapter>[^.]+)\.weight")
_TRAINED_WHOLE = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")


@dataclass(frozen=True)
class LoraSettings:
    """How strong adapters are, and what else is known of them.

    alpha: numerator of the scaling. rank_stabilized: divide by sqrt(r) instead of r. transposed: the weights are
    (in, out). config: peft's own adapter_config.json of the run, or empty.
    """

    alpha: float
    rank_stabilized: bool
    transposed: bool
    config: dict[str, Any]

    def scale(self, rank: int) -> float:
        """What the product of the matrices is multiplied by."""
        return self.alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def find_settings(checkpoint: Checkpoint, alpha: float | None) -> LoraSettings:
    """alpha: the user's word, or None to look for it in the checkpoint.

    Raises ValueError when it is found nowhere, or with different values. A value of 0 counts as not found: old mergers
    wrote it where they did not know better.
    """
    path = checkpoint.folder / "lora_adapter" / ADAPTER_CONFIG
    config = json.loads(path.read_text()) if path.is_file() else {}
    unsupported = [key for key in ("use_dora", "alpha_pattern") if config.get(key)]
    if unsupported:
        raise ValueError(f"{path} uses {' and '.join(unsupported)}, which this merger does not know")
    if alpha is None:
        alpha = _recorded_alpha(checkpoint, path, config)
    if not alpha > 0:
        raise ValueError(f"--lora_alpha is {alpha}: expected a positive number")
    rank_stabilized, transposed = bool(config.get("use_rslora")), bool(config.get("fan_in_fan_out"))
    return LoraSettings(float(alpha), rank_stabilized, transposed, config)


def _recorded_alpha(checkpoint: Checkpoint, path: Path, config: dict[str, Any]) -> float:
    meta = checkpoint.folder / "lora_train_meta.json"
    found = {
        str(path): config.get("lora_alpha"),
        str(meta): json.loads(meta.read_text()).get("lora_alpha") if meta.is_file() else None,
    }
    positive = {where: value for where, value in found.items() if value}
    if len(set(positive.values())) != 1:
        what = f"different values of it: {positive}" if positive else f"it is not recorded in any of {sorted(found)}"
        raise ValueError(
            f"the checkpoint holds LoRA adapters, whose strength depends on lora_alpha, and {what}; "
            "give the value of the training run: --lora_alpha N"
        )
    return next(iter(positive.values()))


class MergedAdapters(WeightSource):
    """The weights of a peft model with its adapters added, under the names of the model without them."""

    exact = False

    def __init__(self, source: WeightSource, settings: LoraSettings):
        self.source, self.settings = source, settings
        self._inner: dict[str, str] = {}  # name without adapters -> name in the source
        self._matrices: dict[str, dict[str, str]] = {}  # module -> {"A": name in the source, "B": ...}
        self._trained_whole: set[str] = set()
        adapters: set[str] = set()
        for inner in source.names():
            name = inner.removeprefix(PREFIX)
            if match := _MATRIX.fullmatch(name):
                self._matrices.setdefault(match["module"], {})[match["which"]] = inner
                adapters.add(match["adapter"])
            elif match := _TRAINED_WHOLE.fullmatch(name):
                self._inner[f"{match['module']}.{match['rest']}"] = inner
                self._trained_whole.add(match["module"])
            elif ".lora_" in name:
                raise ValueError(
                    f"{inner} is a kind of adapter that this merger does not know: expected lora_A, lora_B"
                )
            elif ".original_module." not in name:
                self._inner[name.replace(".base_layer.", ".")] = inner
        if len(adapters) != 1:
            raise ValueError(f"the checkpoint holds several adapters, {sorted(adapters)}: expected one")
        for module, pair in self._matrices.items():
            if set(pair) != {"A", "B"} or f"{module}.weight" not in self._inner:
                raise ValueError(f"the adapter of {module} is not whole: expected lora_A, lora_B and base_layer.weight")

    def names(self) -> list[str]:
        return list(self._inner)

    def infos(self, expected: Mapping[str, Shape]) -> dict[str, TensorInfo]:
        shapes = {inner: expected[name] for name, inner in self._inner.items() if name in expected}
        found = self.source.infos(shapes)
        infos = {name: found[inner] for name, inner in self._inner.items()}
        for module, pair in self._matrices.items():
            a, b, base = found[pair["A"]].shape, found[pair["B"]].shape, infos[f"{module}.weight"].shape
            product = (b[0], a[1]) if len(a) == len(b) == 2 and a[0] == b[1] else None
            if product != (base[::-1] if self.settings.transposed else base):
                raise ValueError(f"the adapter of {module}, B {b} and A {a}, does not fit its weight of {base}")
        return infos

    def read(self, name: str) -> torch.Tensor:
        base = self.source.read(self._inner[name])
        pair = self._matrices.get(name.removesuffix(".weight"))
        if pair is None:
            return base
        a, b = self.source.read(pair["A"]).float(), self.source.read(pair["B"]).float()
        change = (b @ a) * self.settings.scale(len(a))
        return (base.float() + (change.T if self.settings.transposed else change)).to(base.dtype)

    def read_again(self, name: str) -> torch.Tensor:
        """In double precision, one rank-one term after the other."""
        base = self.source.read_again(self._inner[name])
        pair = self._matrices.get(name.removesuffix(".weight"))
        if pair is None:
            return base
        a, b = self.source.read_again(pair["A"]).double(), self.source.read_again(pair["B"]).double()
        whole = base.to(torch.float64, copy=True)
        for row, column in zip(a, b.T):
            first, second = (row, column) if self.settings.transposed else (column, row)
            whole.addr_(first, second, alpha=self.settings.scale(len(a)))
        return whole.to(base.dtype)

    def is_untrained(self) -> bool:
        """Whether the adapters change nothing, as they do before the first step, and no module was trained whole."""
        return not self._trained_whole and not any(
            self.source.read(pair["B"]).count_nonzero() for pair in self._matrices.values()
        )

    # ---- export -------------------------------------------------------------------------------------------------

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """The adapters under the names of peft's files."""
        found = {
            f"{PREFIX}{module}.lora_{which}.weight": self.source.read(inner).contiguous()
            for module, pair in self._matrices.items()
            for which, inner in pair.items()
        }
        for name, inner in self._inner.items():
            if _TRAINED_WHOLE.fullmatch(inner.removeprefix(PREFIX)):
                found[PREFIX + name] = self.source.read(inner).contiguous()
        return found

    def adapter_config(self, base_model: str | None, task_type: str) -> dict[str, Any]:
        """peft's adapter_config.json: the run's own if the checkpoint has it, else made from the matrices."""
        ranks = {module: self.source.infos({})[pair["A"]].shape[0] for module, pair in self._matrices.items()}
        rank = max(set(ranks.values()), key=list(ranks.values()).count)
        made = {
            "peft_type": "LORA",
            "task_type": task_type,
            "base_model_name_or_path": base_model,
            "r": rank,
            "rank_pattern": {module: r for module, r in ranks.items() if r != rank},
            "target_modules": sorted(self._matrices),
            "modules_to_save": sorted(self._trained_whole) or None,
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": self.settings.rank_stabilized,
            "fan_in_fan_out": self.settings.transposed,
        }
        return {**made, **self.settings.config, "lora_alpha": self.settings.alpha, "inference_mode": True}


def with_adapters_merged(checkpoint: Checkpoint, alpha: float | None) -> WeightSource:
    """The checkpoint's weights, adapters added if there are any. Raises ValueError for alpha without adapters."""
    source = checkpoint.source
    if any(".lora_" in name for name in source.names()):
        return MergedAdapters(source, find_settings(checkpoint, alpha))
    if alpha is not None:
        raise ValueError("--lora_alpha is given, but the checkpoint holds no LoRA adapters")
    return source
