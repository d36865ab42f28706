"""The weights of a MegatronEngine: loading them from HuggingFace files, reading shards, and gathering them."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from verl.engines.megatron.layout import Conversion, ShardRank
from verl.engines.megatron.runtime import ParallelRanks
from verl.engines.megatron.weight_files import WeightFiles
from verl.utils.shards import Shard, boxes_of

#: layout -> `partition_dim` of megatron-core
_PARTITION = {"columns": 1, "experts_gated": 1, "experts_columns": 2}


def rank_of(conversion: Conversion, ranks: ParallelRanks) -> ShardRank:
    """The shard of a parameter that a rank has."""
    if conversion.is_expert:
        return ShardRank(ranks.et, ranks.et_size, ranks.e, ranks.e_size)
    return ShardRank(ranks.t, ranks.t_size)


def global_names(chunks: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """The parameters of this rank's stage, with the number of a layer in the whole model in its name."""
    parameters = {}
    for chunk in chunks:
        numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, local, suffix = name.split(".", 3)
                name = f"decoder.layers.{numbers[local]}.{suffix}"
            parameters[name] = parameter
    return parameters


@torch.no_grad()
def load_weights(
    chunks: list[torch.nn.Module], table: list[Conversion], files: WeightFiles, ranks: ParallelRanks
) -> None:
    """Load this rank's shards of the weights. A missing value head is initialized with zeros.

    Raises:
        ValueError: a weight is missing, has another shape, is not finite, or is not used.
    """
    files.check_names(table)
    for name, parameter, conversion in local_parameters(chunks, table):
        if name.startswith("score.") and name not in files:
            parameter.zero_()  # the first advantages are then the returns themselves
            continue
        position = rank_of(conversion, ranks)
        value = conversion.join([files.read(region) for region in conversion.regions(position)], position)
        if not value.isfinite().all():
            raise ValueError(f"{files.path!r}: expected finite weights, found NaN or infinite values in {name}")
        parameter.copy_(value)


def mark_shards(chunks: list[torch.nn.Module], table: list[Conversion]) -> None:
    """Mark the parameters that tensor-parallel ranks shard, which megatron-core does when it initializes weights.

    The gradient norm counts a parameter without the mark on the first rank only.
    """
    for _, parameter, conversion in local_parameters(chunks, table):
        parameter.tensor_model_parallel = conversion.layout != "replicated"
        parameter.partition_dim = _PARTITION.get(conversion.layout, 0)
        parameter.partition_stride = 1


def local_parameters(
    chunks: list[torch.nn.Module], table: list[Conversion]
) -> Iterator[tuple[str, torch.nn.Parameter, Conversion]]:
    """(name, parameter, conversion) of this rank's parameters. Tied embeddings are also on the last stage."""
    by_name = {conversion.name: conversion for conversion in table}
    for name, parameter in global_names(chunks).items():
        if name == "output_layer.weight" and name not in by_name:
            yield name, parameter, by_name["embedding.word_embeddings.weight"]
        else:
            yield name, parameter, by_name[name]


class WeightShards:
    """This rank's parameters as chunks of HuggingFace tensors, in the order of the layers. A stage reads its own ones.

    Attributes:
        layout: the shard of each chunk; one parameter may have several.
    """

    def __init__(self, chunks: list[torch.nn.Module], table: list[Conversion], ranks: ParallelRanks):
        order = {conversion: i for i, conversion in enumerate(table)}
        parameters = ((parameter, conversion) for _, parameter, conversion in local_parameters(chunks, table))
        self._parameters = [
            (parameter, conversion, rank_of(conversion, ranks))
            for parameter, conversion in sorted(parameters, key=lambda item: order[item[1]])
        ]
        self.layout = [
            Shard(region.source, region.full, box)
            for _, conversion, position in self._parameters
            for region in conversion.regions(position)
            for box in boxes_of(region.full, region.offset, region.shape)
        ]

    def read(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of `layout`."""
        for parameter, conversion, position in self._parameters:
            for region, values in conversion.boxes(parameter.detach(), position):
                count = len(boxes_of(region.full, region.offset, region.shape))
                yield from [values] if count == 1 else values


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
        self._experts = ranks.groups.get_expert_tensor_and_model_parallel_group()
        shapes = {name: (tuple(p.shape), p.dtype) for name, p in self._parameters.items()}
        stages: list[dict[str, Any]] = [shapes]
        if ranks.p_size > 1:
            stages = [{} for _ in range(ranks.p_size)]
            dist.all_gather_object(stages, shapes, group=self._pipeline)
        self._stage_of = {name: i for i, names in reversed(list(enumerate(stages))) for name in names}
        self._shapes = {name: shape for names in stages for name, shape in names.items()}

    def gather(
        self, tensors: dict[str, torch.Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, full tensor). Collective.

        Args:
            tensors: name -> tensor shaped like the parameter of that name; default: the parameters.
            dtype: dtype of the result; shards are cast before they are gathered.
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
            shape, parameter_dtype = self._shapes[conversion.name]
            if local is None:
                device = next(iter(self._parameters.values())).device
                local = torch.empty(shape, dtype=dtype or parameter_dtype, device=device)
            source = dist.get_process_group_ranks(self._pipeline)[stage]
            local = local.contiguous()
            dist.broadcast(local, source, group=self._pipeline)
        return self._full_tensors(conversion, local.contiguous())

    def _full_tensors(self, conversion: Conversion, local: torch.Tensor) -> list[torch.Tensor]:
        """The full tensors of a parameter, from the shards of the ranks of a stage."""
        ranks, size, count = self._ranks, 1, 1
        if conversion.is_expert:
            size, count, group = ranks.et_size, ranks.e_size, self._experts
        elif conversion.layout != "replicated":
            size, group = ranks.t_size, self._tensor
        shards = [local]
        if size * count > 1:
            shards = [torch.empty_like(local) for _ in range(size * count)]
            dist.all_gather(shards, local, group=group)
        full = {name: local.new_empty(shape) for name, shape in zip(conversion.sources, conversion.shapes)}
        for i, shard in enumerate(shards):
            for region, values in conversion.boxes(shard, ShardRank(i % size, size, i // size, count)):
                full[region.source][region.slices] = values
        return list(full.values())
