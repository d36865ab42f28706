"""HuggingFace weights as megatron-core parameters and back.

A `Conversion` names one parameter of megatron-core and the HuggingFace tensors that it is made of, and says how tensor
parallelism shards it:

| layout     | parameter of one rank                                                                    |
|------------|------------------------------------------------------------------------------------------|
| replicated | the tensor                                                                               |
| rows       | a run of rows (embedding and output layer: the vocabulary padded to a multiple of ranks)  |
| columns    | a run of columns                                                                         |
| qkv        | for each of the rank's key/value heads: its query heads, the key head, the value head    |
| gated      | the rank's rows of gate_proj, then those of up_proj                                      |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from verl.engines.megatron.convert import head_size
from verl.engines.megatron.runtime import ParallelRanks
from verl.modeling.huggingface import model_source

Layout = Literal["replicated", "rows", "columns", "qkv", "gated"]


@dataclass(frozen=True)
class Conversion:
    """One parameter of megatron-core.

    Attributes:
        name: its name, with the number of the layer in the whole model.
        sources: HuggingFace names.
        layout: as in the module docstring.
        heads, kv_heads, head_size: of attention, for "qkv".
        rows: of the HuggingFace tensor, for "rows" that are padded.
    """

    name: str
    sources: tuple[str, ...]
    layout: Layout
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    rows: int | None = None

    def shard(self, tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """The parameter of one of `size` tensor-parallel ranks."""
        if self.layout == "replicated":
            return tensors[0]
        if self.layout == "columns":
            return tensors[0].chunk(size, 1)[rank]
        if self.layout == "gated":
            return torch.cat([x.chunk(size)[rank] for x in tensors])
        if self.layout == "qkv":
            by_group = [x.unflatten(0, (self.kv_heads, -1)) for x in tensors]
            return torch.cat(by_group, 1).chunk(size)[rank].flatten(0, 1)
        (full,) = tensors
        fill = -len(full) % size
        padded = pad(full, (0, 0, 0, fill)) if fill else full
        return padded.chunk(size)[rank]

    def merge(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """The HuggingFace tensors, in the order of `sources`, from the parameters of all tensor-parallel ranks."""
        if self.layout == "replicated":
            return [shards[0]]
        if self.layout == "columns":
            return [torch.cat(shards, 1)]
        if self.layout == "gated":
            halves = [x.chunk(2) for x in shards]
            return [torch.cat([half[i] for half in halves]) for i in (0, 1)]
        full = torch.cat(shards)
        if self.layout == "qkv":
            size, per_group = self.head_size, self.heads // self.kv_heads
            by_group = full.unflatten(0, (self.kv_heads, -1))
            return [x.flatten(0, 1) for x in by_group.split([per_group * size, size, size], 1)]
        return [full[: self.rows]]


def conversions(hf: Any, kind: str) -> list[Conversion]:
    """Every parameter of a model, in the order of HuggingFace's; `kind` as in `EngineSpec`."""
    attention = {"heads": hf.num_attention_heads, "kv_heads": hf.num_key_value_heads, "head_size": head_size(hf)}
    found = [Conversion("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows", rows=hf.vocab_size)]
    for i in range(hf.num_hidden_layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        for suffix in ("weight", "bias") if hf.model_type == "qwen2" else ("weight",):
            names = tuple(f"{theirs}self_attn.{x}_proj.{suffix}" for x in "qkv")
            found.append(Conversion(f"{ours}self_attention.linear_qkv.{suffix}", names, "qkv", **attention))
        plain: list[tuple[str, str, Layout]] = [
            ("self_attention.linear_proj", "self_attn.o_proj", "columns"),
            ("mlp.linear_fc2", "mlp.down_proj", "columns"),
            ("input_layernorm", "input_layernorm", "replicated"),
            ("pre_mlp_layernorm", "post_attention_layernorm", "replicated"),
        ]
        if hf.model_type == "qwen3":
            plain += [(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", "replicated") for x in "qk"]
        found += [Conversion(f"{ours}{a}.weight", (f"{theirs}{b}.weight",), layout) for a, b, layout in plain]
        gated = tuple(f"{theirs}mlp.{x}_proj.weight" for x in ("gate", "up"))
        found.append(Conversion(f"{ours}mlp.linear_fc1.weight", gated, "gated"))
    found.append(Conversion("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"))
    if kind != "causal_lm":
        found += [Conversion(f"score.{x}", (f"score.{x}",), "replicated") for x in ("weight", "bias")]
    elif not hf.tie_word_embeddings:
        found.append(Conversion("output_layer.weight", ("lm_head.weight",), "rows", rows=hf.vocab_size))
    return found


def global_names(chunks: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """The parameters of this rank's stage, with the number of a layer in the whole model in its name."""
    found = {}
    for chunk in chunks:
        numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                name = f"decoder.layers.{numbers[local]}.{rest}"
            found[name] = parameter
    return found


# ---- files ----------------------------------------------------------------------------------------------------------


class WeightFiles:
    """The tensors of a HuggingFace folder, read one at a time.

    Args:
        path: a folder, or an id of a hub.

    Raises:
        ValueError: there are no *.safetensors.
    """

    def __init__(self, path: str):
        from safetensors import safe_open

        self.path = path
        folder = Path(model_source(path))
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"strategy=megatron: expected *.safetensors in {folder}, found none")
        self._opened = [safe_open(file, "pt") for file in files]
        self._where = {name: file for file in self._opened for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return self._resolve(name) in self._where

    def names(self) -> list[str]:
        return list(self._where)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._where[self._resolve(name)].get_tensor(self._resolve(name))

    def _resolve(self, name: str) -> str:
        """Files of a model without a head may have no `model.` prefix."""
        return name if name in self._where else name.removeprefix("model.")


@torch.no_grad()
def load_weights(
    chunks: list[torch.nn.Module], table: list[Conversion], files: WeightFiles, ranks: ParallelRanks
) -> None:
    """Load this rank's shards of the weights. A missing value head is initialized with zeros.

    Raises:
        ValueError: a weight is missing, has another shape, is not finite, or is not used.
    """
    used = {source for conversion in table for source in conversion.sources}
    spare = [name for name in files.names() if name not in used and f"model.{name}" not in used]
    unknown = [name for name in spare if name.rpartition(".")[2] != "inv_freq" and name.split(".")[0] not in _HEADS]
    missing = [name for name in used if name not in files and not name.startswith("score.")]
    if unknown or missing:
        raise ValueError(
            f"{files.path!r}: expected the weights of its config.json, missing {sorted(missing)[:5]}, not used "
            f"{sorted(unknown)[:5]}"
        )
    for name, parameter, conversion in _own(chunks, table):
        if name.startswith("score.") and name not in files:
            parameter.zero_()  # the first advantages are then the returns themselves
            continue
        value = conversion.shard([files[source] for source in conversion.sources], ranks.t, ranks.t_size)
        if value.shape != parameter.shape:
            raise ValueError(
                f"{files.path!r}: {', '.join(conversion.sources)} has the shape {list(value.shape)} on a rank, "
                f"expected {list(parameter.shape)}"
            )
        if not value.isfinite().all():
            raise ValueError(f"{files.path!r}: expected finite weights, found NaN or infinite values in {name}")
        parameter.copy_(value)


def mark_shards(chunks: list[torch.nn.Module], table: list[Conversion]) -> None:
    """Mark the parameters that tensor-parallel ranks shard, which megatron-core does when it initializes weights.

    The gradient norm counts a parameter without the mark on the first rank only.
    """
    for _, parameter, conversion in _own(chunks, table):
        parameter.tensor_model_parallel = conversion.layout != "replicated"
        parameter.partition_dim = 1 if conversion.layout == "columns" else 0
        parameter.partition_stride = 1


#: heads of another kind of the same model
_HEADS = ("lm_head", "score", "classifier", "v_head")


def _own(
    chunks: list[torch.nn.Module], table: list[Conversion]
) -> Iterator[tuple[str, torch.nn.Parameter, Conversion]]:
    """(name, parameter, conversion) of this rank's parameters. Tied embeddings are also on the last stage."""
    by_name = {conversion.name: conversion for conversion in table}
    for name, parameter in global_names(chunks).items():
        if name == "output_layer.weight" and name not in by_name:
            yield name, parameter, by_name["embedding.word_embeddings.weight"]
        else:
            yield name, parameter, by_name[name]


# ---- gathering ------------------------------------------------------------------------------------------------------


class WeightGatherer:
    """Gathers HuggingFace tensors over tensor-parallel ranks and pipeline stages.

    The plan (which stage holds a parameter, and the shapes) is made once; the constructor is a collective call.
    """

    def __init__(self, chunks: list[torch.nn.Module], table: list[Conversion], ranks: ParallelRanks):
        self._ranks = ranks
        self._table = table
        self._parameters = global_names(chunks)
        self._pipeline = ranks.groups.get_pipeline_model_parallel_group()
        self._tensor = ranks.groups.get_tensor_model_parallel_group()
        own = {name: (tuple(p.shape), p.dtype) for name, p in self._parameters.items()}
        stages: list[dict[str, Any]] = [own]
        if ranks.p_size > 1:
            stages = [{} for _ in range(ranks.p_size)]
            dist.all_gather_object(stages, own, group=self._pipeline)
        self._stage_of = {name: i for i, names in reversed(list(enumerate(stages))) for name in names}
        self._shapes = {name: shape for names in stages for name, shape in names.items()}

    def gather(
        self, tensors: dict[str, torch.Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, full tensor). Collective.

        Args:
            tensors: name -> tensor shaped like the parameter of that name; default: the parameters.
            dtype: of the result; shards are cast before they are gathered.
        """
        tensors = {name: p.detach() for name, p in self._parameters.items()} if tensors is None else tensors
        for conversion in self._table:
            stage = self._stage_of[conversion.name]
            local = None
            if stage == self._ranks.p:
                local = tensors[conversion.name]
                local = local if dtype is None else local.to(dtype)
            yield from zip(conversion.sources, self._gather(conversion, stage, local, dtype))

    def _gather(
        self, conversion: Conversion, stage: int, local: torch.Tensor | None, dtype: torch.dtype | None
    ) -> list[torch.Tensor]:
        """From the ranks of a stage to all ranks: each stage receives its tensor-parallel shard, and gathers."""
        if self._ranks.p_size > 1:
            shape, own_dtype = self._shapes[conversion.name]
            if local is None:
                device = next(iter(self._parameters.values())).device
                local = torch.empty(shape, dtype=dtype or own_dtype, device=device)
            source = dist.get_process_group_ranks(self._pipeline)[stage]
            local = local.contiguous()
            dist.broadcast(local, source, group=self._pipeline)
        if self._ranks.t_size == 1 or conversion.layout == "replicated":
            return conversion.merge([local] * self._ranks.t_size)
        shards = [torch.empty_like(local) for _ in range(self._ranks.t_size)]
        dist.all_gather(shards, local.contiguous(), group=self._tensor)
        return conversion.merge(shards)
