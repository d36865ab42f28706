"""Checkpoints of megatron-core: `dist_ckpt/`, written by megatron.core.dist_checkpointing (format torch_dist).

The files are those of torch.distributed.checkpoint; megatron-core is not needed to read them. Its parameters are
converted to HuggingFace's as in the engine of strategy=megatron. A layer's tensor is a slice of one tensor of all
layers, or has a separate key:

| parameter         | keys                                                                                        |
|-------------------|---------------------------------------------------------------------------------------------|
| of a layer i      | decoder.layers.NAME, index i of the first dimension; or decoder.layers.i.NAME                |
| of experts        | ....mlp.experts.experts.NAME, with one more dimension; or ....mlp.experts.experts.e.NAME     |
| gate and up       | KEY, the rows of the gate first; or KEY_w and KEY_v                                         |
| norms             | as with Megatron's own layers, or, of Transformer Engine, LINEAR.layer_norm_weight           |
"""

import re
from pathlib import Path

import torch

from verl.engines.megatron.layout import ARCHITECTURES, Conversion, ShardRank, conversions
from verl.model_merger.sources import ShardFiles, WeightSource
from verl.utils.paths import read_json

FOLDER = "dist_ckpt"

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
#: names of Transformer Engine's layers, which contain the norm before them
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
#: parameters of this project's experts, and Megatron's
_EXPERTS = {
    "mlp.experts.gate_up_proj": "linear_fc1.weight",
    "mlp.experts.down_proj": "linear_fc2.weight",
}
_HEAD = {"score.weight": "output_layer.weight", "score.bias": "output_layer.bias"}


class MegatronCheckpoint(WeightSource):
    """The model of `dist_ckpt/`; the optimizer state is not read.

    Args:
        folder: `.../actor/dist_ckpt`.
        config_folder: with the HuggingFace config.

    Raises:
        ValueError: a file is missing or truncated, or the architecture is not supported.
    """

    def __init__(self, folder: Path, config_folder: Path):
        self.folder = folder
        path = folder / "metadata.json"
        if path.is_file() and (format_name := read_json(path).get("sharded_backend")) != "torch_dist":
            raise ValueError(f"{path}: expected the format torch_dist, found {format_name}, which is not supported")
        self._files = ShardFiles(folder)
        self._tensors = self._files.tensors
        self._conversions: dict[str, Conversion] = {}
        for conversion in self._table(config_folder):
            self._conversions |= dict.fromkeys(conversion.sources, conversion)

    @property
    def has_model(self) -> bool:
        """Whether it contains weights; a run may save them in HuggingFace's format, and only the optimizer here."""
        return "embedding.word_embeddings.weight" in self._tensors

    def _table(self, config_folder: Path) -> list[Conversion]:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(config_folder)
        if config.model_type not in ARCHITECTURES:
            raise ValueError(
                f"{config_folder}: expected a model of {', '.join(ARCHITECTURES)}, found {config.model_type}: "
                "checkpoints of Megatron are merged for these"
            )
        head = self._tensors.get("output_layer.weight")
        is_critic = head is not None and head.size[0] == 1
        table = conversions(config, "value" if is_critic else "causal_lm")
        return [each for each in table if each.name != "score.bias" or "output_layer.bias" in self._tensors]

    def names(self) -> list[str]:
        return list(self._conversions)

    def read(self, name: str) -> torch.Tensor:
        conversion = self._conversions[name]
        stacked = []
        for parts in self._stored(conversion):  # one entry, or one for each expert
            tensors = [self._files.read(key, index) for key, index in parts]
            stacked.append(torch.cat(tensors, -2) if len(tensors) > 1 else tensors[0])
        full = stacked[0] if not conversion.is_expert or stacked[0].dim() == 3 else torch.stack(stacked)
        position = ShardRank()
        results = {s: full.new_empty(shape) for s, shape in zip(conversion.sources, conversion.shapes)}
        for region, values in conversion.boxes(full, position):
            if values.shape != region.shape:
                raise ValueError(
                    f"{self.folder}: {region.source} has the shape {list(values.shape)}, expected {list(region.shape)} "
                    "as in config.json"
                )
            results[region.source][region.slices] = values
        return results[name]

    def _stored(self, conversion: Conversion) -> list[list[tuple[str, tuple[int, ...]]]]:
        """(key, index of the first dimensions) of the tensors that make up a parameter. Raises ValueError."""
        for candidates in self._candidates(conversion):
            entries = [self._parts(key, index) for key, index in candidates]
            if all(entries):
                return entries
        raise ValueError(f"{self.folder} has no {conversion.name}: it is not the model of config.json")

    def _parts(self, key: str, index: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        if key in self._tensors:
            return [(key, index)]
        halves = [f"{key}_w", f"{key}_v"]
        return [(half, index) for half in halves] if all(half in self._tensors for half in halves) else []

    def _candidates(self, conversion: Conversion) -> list[list[tuple[str, tuple[int, ...]]]]:
        if (match := _LAYER.fullmatch(conversion.name)) is None:
            return [[(_HEAD.get(conversion.name, conversion.name), ())]]
        layer, name = int(match[1]), match[2]
        prefixes: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("decoder.layers.", (layer,)),
            (f"decoder.layers.{layer}.", ()),
        )
        if name not in _EXPERTS:
            names = [name, _FUSED[name]] if name in _FUSED else [name]
            return [[(prefix + each, index)] for prefix, index in prefixes for each in names]
        expert_name, count = _EXPERTS[name], conversion.shapes[0][0]
        together = [[(f"{prefix}mlp.experts.experts.{expert_name}", index)] for prefix, index in prefixes]
        apart = [[(f"{p}mlp.experts.experts.{e}.{expert_name}", i) for e in range(count)] for p, i in prefixes]
        return together + apart
