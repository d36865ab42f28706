"""The checkpoint of a `MegatronEngine`. Any parallel sizes load it.

huggingface/    config, and the weights if `hf_model` is in save_contents
shards/         weights and optimizer state with HuggingFace names and shapes; every rank writes its own
extra.pt        the learning-rate schedule

A weight W has the keys `model.module.W`, `optimizer.state.module.W.exp_avg`, `....exp_avg_sq` and, if the model is not
float32, `....main`: the float32 weight of the optimizer.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from verl.checkpoints.shard_files import Boxes, BoxLoadPlanner, Region
from verl.engines.checkpoint import load_shards, open_shards
from verl.engines.megatron.layout import Conversion
from verl.engines.megatron.runtime import ParallelRanks
from verl.engines.megatron.weights import local_parameters, rank_of

_STEP = "optimizer.step"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "main"


class EngineState:
    """The weights and the optimizer state of a rank as boxes of HuggingFace tensors.

    Args:
        optimizer: megatron-core's; None for a model that is not trained.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], table: list[Conversion], ranks: ParallelRanks, optimizer: Any | None
    ):
        self._ranks = ranks
        self._optimizers = [] if optimizer is None else [x for x in optimizer.chained_optimizers if x.optimizer]
        self._parameters = {p: conversion for _, p, conversion in local_parameters(chunks, table)}

    # ---- saving -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def weights(self) -> Boxes:
        """Copies of the weights on the host."""
        boxes: Boxes = {}
        for parameter, conversion in self._parameters.items():
            self._add(boxes, conversion, parameter, "model.module.{}")
        return boxes

    @torch.no_grad()
    def optimizer_state(self) -> Boxes:
        """Copies of the optimizer state on the host; data-parallel ranks share the parameters. Collective."""
        inner = [optimizer.optimizer for optimizer in self._optimizers]
        groups = [group for optimizer in inner for group in (*optimizer.state.values(), *optimizer.param_groups)]
        step = int(max((group["step"] for group in groups if "step" in group), default=0))
        boxes: Boxes = {_STEP: [(Region(_STEP, (0,), (1,), (1,)), torch.tensor([step]))]}
        for optimizer in self._optimizers:
            names = (*_MOMENTS, _MAIN) if step else (_MAIN,)
            for parameter, tensors in _full_state(optimizer, self._parameters, names):
                for name, values in tensors.items():
                    key = f"optimizer.state.module.{{}}.{name}"
                    self._add(boxes, self._parameters[parameter], values, key)
        return boxes

    def _add(self, boxes: Boxes, conversion: Conversion, local: torch.Tensor, key: str) -> None:
        for region, values in conversion.boxes(local, rank_of(conversion, self._ranks)):
            copied = values.contiguous().to("cpu", copy=True)
            boxes.setdefault(key.format(region.source), []).append((region, copied))

    # ---- loading ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: Path, with_optimizer: bool) -> None:
        """Restore weights, and the optimizer state. Raises ValueError if the files are of a different model."""
        stored = open_shards(folder).read_metadata().state_dict_metadata.keys()
        requested: Boxes = {}
        fills = [
            (parameter, self._request(requested, conversion, "model.module.{}", parameter.dtype))
            for parameter, conversion in self._parameters.items()
        ]
        moments = []
        if with_optimizer:
            if _STEP not in stored:
                raise ValueError(f"{folder} was saved without optimizer: remove it from checkpoint.load_contents")
            step = torch.zeros(1, dtype=torch.int64)
            requested[_STEP] = [(Region(_STEP, (0,), (1,), (1,)), step)]
            names = [name for name in (*_MOMENTS, _MAIN) if any(key.endswith(f".{name}") for key in stored)]
            for optimizer in self._optimizers:
                for slot in _slots(optimizer, self._parameters):
                    conversion = self._parameters[slot.parameter]
                    keys = {name: f"optimizer.state.module.{{}}.{name}" for name in names}
                    boxes = {n: self._request(requested, conversion, key, torch.float32) for n, key in keys.items()}
                    moments.append((optimizer, slot, conversion, boxes))
        load_shards(folder, requested, BoxLoadPlanner())
        for parameter, boxes in fills:
            parameter.copy_(self._join(self._parameters[parameter], boxes))
        for optimizer in self._optimizers:
            optimizer.reload_model_params()
        for optimizer, slot, conversion, boxes in moments:
            slot.fill(optimizer, {name: self._join(conversion, values) for name, values in boxes.items()}, int(step))

    def _request(self, requested: Boxes, conversion: Conversion, key: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """Add the boxes of a parameter to the request. Returns tensors that reading fills."""
        values = []
        for region in conversion.regions(rank_of(conversion, self._ranks)):
            values.append(torch.zeros(region.shape, dtype=dtype))
            requested.setdefault(key.format(region.source), []).append((region, values[-1]))
        return values

    def _join(self, conversion: Conversion, values: list[torch.Tensor]) -> torch.Tensor:
        return conversion.join(values, rank_of(conversion, self._ranks))


# ---- megatron-core's optimizers -------------------------------------------------------------------------------------


class _Slot:
    """The state of one parameter in an optimizer."""

    def __init__(self, parameter: torch.Tensor, main: torch.Tensor, run: slice | None, group: dict[str, Any]):
        # main: what the optimizer updates: the parameter, a float32 copy, or a run of its elements (None: all)
        self.parameter, self.main, self.run, self.group = parameter, main, run, group

    def fill(self, optimizer: Any, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Set the state from tensors shaped like the parameter."""
        flat = {name: values.flatten() for name, values in tensors.items()}
        local = {name: (x if self.run is None else x[self.run]).to(self.main.device) for name, x in flat.items()}
        if _MAIN in local and self.main is not self.parameter and self.parameter.dtype != torch.float32:
            self.main.copy_(local[_MAIN].view_as(self.main))
        if not step:
            return
        state = optimizer.optimizer.state[self.main]
        for name in _MOMENTS:
            state[name] = local[name].view_as(self.main).clone()
        if isinstance(optimizer.optimizer, torch.optim.Adam):
            state["step"] = torch.tensor(float(step))
        else:  # the fused optimizers count in the group
            self.group["step"] = step


def _slots(optimizer: Any, parameters: Iterable[torch.Tensor]) -> Iterator[_Slot]:
    """The parameters of the model of which this rank has some state in an optimizer."""
    groups = optimizer.optimizer.param_groups
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, i) in optimizer.model_param_group_index_map.items():
            run = optimizer._get_model_param_range_map(parameter)["param"]
            yield _Slot(parameter, groups[group]["params"][i], slice(run.start, run.end), groups[group])
        return
    models = {vars(p).get("main_param", p): p for p in parameters}
    for group in groups:
        for main in group["params"]:
            yield _Slot(models[main], main, None, group)


def _full_state(
    optimizer: Any, parameters: Iterable[torch.Tensor], names: tuple[str, ...]
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """(parameter, its optimizer state, shaped like it) of the parameters that this rank writes. Collective."""
    slots = {slot.parameter: slot for slot in _slots(optimizer, parameters)}
    if not isinstance(optimizer, DistributedOptimizer):
        for parameter, slot in slots.items():
            yield parameter, _tensors(optimizer, slot, names)
        return
    group = optimizer.data_parallel_group
    for i, parameter in enumerate(p for buffer in optimizer.buffers for p in buffer.params):
        slot, tensors = slots.get(parameter), {}
        local = _tensors(optimizer, slot, names) if slot is not None else {}
        for name in names:
            if name == _MAIN and parameter.dtype == torch.float32:
                continue
            full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if slot is not None:
                full[slot.run] = local[name].flatten()
            dist.all_reduce(full, group=group)
            tensors[name] = full.view_as(parameter)
        if i % group.size() == group.rank():
            yield parameter, tensors


def _tensors(optimizer: Any, slot: _Slot, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    state = optimizer.optimizer.state.get(slot.main, {}) | {_MAIN: slot.main}
    return {name: state[name] for name in names if name != _MAIN or slot.parameter.dtype != torch.float32}
