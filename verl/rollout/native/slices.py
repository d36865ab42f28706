"""The slices of a model's parameters that one rank of a tensor-parallel group has.

Attention heads and the units of the MLP are split by the outputs of q, k, v, gate and up, and by the inputs of o and
down; embedding and head by tokens; of the experts of a layer, a rank has some, in full. With more ranks than key/value
heads, several ranks have the same head. Every rank has all other parameters, such as a vision tower, in full.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from verl.modeling.vision import is_vision_config
from verl.rollout.tensor_parallel import TensorParallel
from verl.utils.shards import Chunk, matrix_shape, whole
from verl.weight_sync import ModuleReceiver
from verl.weight_sync.reshard.plan import Stored

KEY = "rollout.tensor_model_parallel_size"
#: settings of a model's config that the number of ranks must divide, or be a multiple of in the case of _HEADS
_HEADS = "num_key_value_heads"
SIZES = ("num_attention_heads", _HEADS, "intermediate_size", "vocab_size")
#: of a mixture of experts; every rank has some of them
_EXPERTS = ("num_experts", "num_local_experts")


def check_sizes(sizes: Mapping[str, Any], ranks: int) -> None:
    """Raise ValueError if a model cannot be split over `ranks`. sizes: has the keys of SIZES."""
    names = (*SIZES, *(name for name in _EXPERTS if name in sizes))
    for name in names:
        size = sizes[name]
        if size % ranks and not (name == _HEADS and ranks % size == 0):
            fitting = [n for n in range(1, ranks) if all(sizes[key] % n == 0 for key in names)]
            raise ValueError(
                f"{KEY}={ranks} does not divide the model's {name}={size}: use {' or '.join(map(str, fitting))}"
            )


class Slices:
    """The slice of each parameter of a model that this rank has.

    Args:
        config: the model's config.
        tp: the ranks that hold the model.

    Raises:
        ValueError: the number of ranks does not divide the model.
    """

    def __init__(self, config: Any, tp: TensorParallel):
        self._has_images = is_vision_config(config)
        config = config.get_text_config()
        check_sizes(config.to_dict(), tp.size)
        self.tp = tp
        rank, ranks = tp.rank, tp.size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        first, shared = rank * kv_heads // ranks, max(1, kv_heads // ranks)
        q = rank * heads // ranks, (rank + 1) * heads // ranks
        k = heads + first, heads + first + shared
        v = k[0] + kv_heads, k[1] + kv_heads
        by_rows, unit = (0, ranks), [(rank, rank + 1)]
        # last component of a layer's name -> dimension, number of equal units in it, and this rank's ranges of units
        self._rules: dict[str, tuple[int, int, list[tuple[int, int]]]] = {
            "q_proj": (0, heads, [q]),
            "k_proj": (0, kv_heads, [(first, first + shared)]),
            "v_proj": (0, kv_heads, [(first, first + shared)]),
            "qkv_proj": (0, heads + 2 * kv_heads, [q, k, v]),
            "gate_up_proj": (0, 2 * ranks, [(rank, rank + 1), (ranks + rank, ranks + rank + 1)]),
            "o_proj": (1, ranks, unit),
            "down_proj": (1, ranks, unit),
            "experts": (0, ranks, unit),  # gate_up_proj and down_proj of all experts
            **{name: (*by_rows, unit) for name in ("gate_proj", "up_proj", "embed_tokens", "lm_head")},
        }

    def _rule(self, name: str) -> tuple[tuple[int, int, list[tuple[int, int]]] | None, str]:
        """The rule of a parameter, None if it is not split; and whether it is a weight or a bias."""
        layer, _, kind = name.rpartition(".")
        if self._has_images and not name.startswith("lm_head.") and "language_model." not in name:
            return None, kind  # every rank has the vision tower, whose layers may have the same names
        return self._rules.get(layer.rpartition(".")[2]), kind

    def slice_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a parameter, by its HuggingFace name; a view where that is possible."""
        rule, kind = self._rule(name)
        if rule is None:
            return full
        dim, units, ranges = rule
        if dim == 1 and kind == "bias":  # added once, after the sum over the ranks
            return full if self.tp.leads else torch.zeros_like(full)
        unit = full.shape[dim] // units
        chunks = [full.narrow(dim, start * unit, (end - start) * unit) for start, end in ranges]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Stored:
        """Which chunks of a parameter `slice_of` returns, as boxes."""
        shape = tuple(shape)
        full, (rows, columns) = whole(shape), matrix_shape(shape)
        rule, kind = self._rule(name)
        if rule is None or (rule[0] == 1 and kind == "bias"):
            zeros = rule is not None and not self.tp.leads
            return Stored(shape, rows, columns, () if zeros else (Chunk(full),), dtype)
        dim, units, ranges = rule
        unit, at, chunks = (rows, columns)[dim] // units, 0, []
        for start, end in ranges:
            if dim == 0:
                chunks.append(Chunk(full._replace(top=start * unit, bottom=end * unit), row=at))
            else:
                chunks.append(Chunk(full._replace(left=start * unit, right=end * unit), column=at))
            at += (end - start) * unit
        return Stored(shape, at if dim == 0 else rows, at if dim == 1 else columns, tuple(chunks), dtype)

    def cut(self, module: nn.Module) -> None:
        """Replace the parameters of a module on "meta" by parameters of the shapes of their slices."""
        for prefix, part in module.named_modules():
            for name, full in part.named_parameters(recurse=False):
                shard = torch.empty_like(self.slice_of(f"{prefix}.{name}", full), memory_format=torch.contiguous_format)
                part.register_parameter(name, nn.Parameter(shard, requires_grad=False))


class SliceReceiver(ModuleReceiver):
    """Receives parameters into a module that has slices of them: full ones one by one, or the slices."""

    prefers_slices = True

    def __init__(self, module: nn.Module, slices: Slices, shapes: Mapping[str, torch.Size]):
        """shapes: those of the full parameters."""
        super().__init__(module)
        self.slices = slices
        self.full_shapes = shapes

    def _stored_layout(self, name: str, parameter: torch.Tensor) -> Stored:
        return self.slices.stored(name, self.full_shapes[name], parameter.dtype)

    def slice_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """See `StoredWeights.slice_of`."""
        return self.slices.slice_of(name, full)
