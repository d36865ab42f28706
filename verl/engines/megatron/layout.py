"""HuggingFace weights as megatron-core parameters and back.

A `Conversion` names one parameter of megatron-core and the HuggingFace tensors that it is made of, and says which boxes
of them a rank has:

| layout          | parameter of one rank                                                                    |
|-----------------|------------------------------------------------------------------------------------------|
| replicated      | the tensor                                                                               |
| rows            | a run of rows (embedding and output layer: the vocabulary padded to a multiple of ranks) |
| columns         | a run of columns                                                                         |
| qkv             | for each of the rank's key/value heads: its query heads, the key head, the value head    |
| gated           | the rank's rows of gate_proj, then those of up_proj                                      |
| experts_gated   | for each of the rank's experts: its rows of the gate, then those of up                   |
| experts_columns | for each of the rank's experts: a run of columns                                         |

Names and shapes are those of transformers' modules. Files have one tensor per expert, which `WeightFiles` stacks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from verl.checkpoints.shard_files import Region

#: model_type -> whether queries, keys and values have biases; heads of Qwen3 have norms
ARCHITECTURES = {
    "llama": False,
    "mistral": False,
    "mixtral": False,
    "qwen2": True,
    "qwen3": False,
    "qwen3_moe": False,
}

Layout = Literal["replicated", "rows", "columns", "qkv", "gated", "experts_gated", "experts_columns"]

#: layout -> the dimension that tensor-parallel ranks shard
_DIMENSION = {"rows": 0, "columns": 1, "qkv": 0, "gated": 0, "experts_gated": 1, "experts_columns": 2}


@dataclass(frozen=True)
class ShardRank:
    """The position of a shard: `rank` of `size` (expert-)tensor-parallel ranks, `e` of `e_size` of experts."""

    rank: int = 0
    size: int = 1
    e: int = 0
    e_size: int = 1


@dataclass(frozen=True)
class Conversion:
    """One parameter of megatron-core."""

    name: str  # its name, with the number of the layer in the whole model
    sources: tuple[str, ...]  # HuggingFace names
    shapes: tuple[tuple[int, ...], ...]  # shapes of the full tensors
    layout: Layout
    per_group: tuple[int, int] = (0, 0)  # query heads of each key/value head, and their size, for "qkv"

    @property
    def is_expert(self) -> bool:
        return self.layout.startswith("experts")

    def regions(self, position: ShardRank) -> list[Region]:
        """The boxes that the parameter of a rank consists of, in the order of `split`. One may be empty."""
        regions = []
        for source, full in zip(self.sources, self.shapes):
            offset, shape = [0] * len(full), list(full)
            if self.is_expert:
                shape[0] //= position.e_size
                offset[0] = position.e * shape[0]
            halves = 2 if self.layout == "experts_gated" else 1
            if self.layout != "replicated":
                dimension = _DIMENSION[self.layout]
                length = full[dimension] // halves
                size = -(-length // position.size)  # the last ranks of "rows" may have fewer, or none
                start = min(position.rank * size, length)
                offset[dimension], shape[dimension] = start, min(size, length - start)
            regions.append(Region(source, tuple(offset), tuple(shape), full))
            if halves == 2:
                offset[1] += length
                regions.append(Region(source, tuple(offset), tuple(shape), full))
        return regions

    def split(self, local: torch.Tensor) -> list[torch.Tensor]:
        """The values of a rank's parameter, one for each of `regions`; of "rows", with the padding."""
        if self.layout == "gated":
            return list(local.chunk(2))
        if self.layout == "experts_gated":
            return list(local.chunk(2, 1))
        if self.layout == "qkv":
            heads, size = self.per_group
            by_group = local.unflatten(0, (-1, (heads + 2) * size))
            return [x.flatten(0, 1) for x in by_group.split([heads * size, size, size], 1)]
        return [local]

    def join(self, values: list[torch.Tensor], position: ShardRank) -> torch.Tensor:
        """The parameter of a rank from its values."""
        if self.layout == "experts_gated":
            return torch.cat(values, 1)
        if self.layout == "qkv":
            heads, size = self.per_group
            by_group = [x.unflatten(0, (-1, n * size)) for x, n in zip(values, (heads, 1, 1))]
            return torch.cat(by_group, 1).flatten(0, 1)
        joined = torch.cat(values) if len(values) > 1 else values[0]
        fill = -(-self.shapes[0][0] // position.size) - len(joined) if self.layout == "rows" else 0
        return pad(joined, (0, 0, 0, fill)) if fill else joined

    def boxes(self, local: torch.Tensor, position: ShardRank) -> Iterator[tuple[Region, torch.Tensor]]:
        """(box, values) of a rank's parameter."""
        for region, values in zip(self.regions(position), self.split(local)):
            yield region, values[: region.shape[0]] if self.layout == "rows" else values


def head_size(hf: Any) -> int:
    """The size of an attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def sparse_layers(hf: Any) -> list[bool]:
    """Whether each layer has experts."""
    if not hf.model_type.endswith("moe"):
        return [hf.model_type == "mixtral"] * hf.num_hidden_layers
    dense, step = hf.mlp_only_layers or (), hf.decoder_sparse_step
    return [i not in dense and hf.num_local_experts > 0 and (i + 1) % step == 0 for i in range(hf.num_hidden_layers)]


def expert_size(hf: Any) -> int:
    """The inner size of an expert."""
    return hf.intermediate_size if hf.model_type == "mixtral" else hf.moe_intermediate_size


def conversions(hf: Any, kind: str) -> list[Conversion]:
    """Every parameter of a model, in the order of HuggingFace's; `kind` as in `EngineSpec`."""
    hidden, vocabulary = hf.hidden_size, (hf.vocab_size, hf.hidden_size)
    table = [Conversion("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocabulary,), "rows")]
    for i, is_sparse in enumerate(sparse_layers(hf)):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        table += _attention(hf, ours, theirs)
        table += (_experts if is_sparse else _mlp)(hf, f"{ours}mlp.", f"{theirs}mlp.")
        norms = (("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "post_attention_layernorm"))
        table += [
            Conversion(f"{ours}{a}.weight", (f"{theirs}{b}.weight",), ((hidden,),), "replicated") for a, b in norms
        ]
    table.append(Conversion("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),), "replicated"))
    if kind != "causal_lm":
        shapes = {"weight": (1, hidden), "bias": (1,)}
        table += [Conversion(f"score.{x}", (f"score.{x}",), (shape,), "replicated") for x, shape in shapes.items()]
    elif not hf.tie_word_embeddings:
        table.append(Conversion("output_layer.weight", ("lm_head.weight",), (vocabulary,), "rows"))
    return table


def _attention(hf: Any, ours: str, theirs: str) -> Iterator[Conversion]:
    hidden, size = hf.hidden_size, head_size(hf)
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    rows = (heads * size, groups * size, groups * size)
    for suffix in ("weight", "bias") if ARCHITECTURES[hf.model_type] else ("weight",):
        names = tuple(f"{theirs}self_attn.{x}_proj.{suffix}" for x in "qkv")
        shapes = tuple((n, hidden) if suffix == "weight" else (n,) for n in rows)
        name = f"{ours}self_attention.linear_qkv.{suffix}"
        yield Conversion(name, names, shapes, "qkv", per_group=(heads // groups, size))
    output = f"{theirs}self_attn.o_proj.weight"
    yield Conversion(f"{ours}self_attention.linear_proj.weight", (output,), ((hidden, rows[0]),), "columns")
    for x in "qk" if hf.model_type.startswith("qwen3") else "":
        norm = f"{theirs}self_attn.{x}_norm.weight"
        yield Conversion(f"{ours}self_attention.{x}_layernorm.weight", (norm,), ((size,),), "replicated")


def _mlp(hf: Any, ours: str, theirs: str) -> Iterator[Conversion]:
    hidden, inner = hf.hidden_size, hf.intermediate_size
    gated = tuple(f"{theirs}{x}_proj.weight" for x in ("gate", "up"))
    yield Conversion(f"{ours}linear_fc1.weight", gated, ((inner, hidden),) * 2, "gated")
    yield Conversion(f"{ours}linear_fc2.weight", (f"{theirs}down_proj.weight",), ((hidden, inner),), "columns")


def _experts(hf: Any, ours: str, theirs: str) -> Iterator[Conversion]:
    hidden, inner, count = hf.hidden_size, expert_size(hf), hf.num_local_experts
    yield Conversion(f"{ours}router.weight", (f"{theirs}gate.weight",), ((count, hidden),), "replicated")
    gated, down = f"{theirs}experts.gate_up_proj", f"{theirs}experts.down_proj"
    yield Conversion(f"{ours}experts.gate_up_proj", (gated,), ((count, 2 * inner, hidden),), "experts_gated")
    yield Conversion(f"{ours}experts.down_proj", (down,), ((count, hidden, inner),), "experts_columns")
