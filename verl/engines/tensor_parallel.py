"""Tensor parallelism: the matrices of every layer are spread over the ranks of a group.

The ranks of a group have the same rows and tokens. Each holds some columns of the first matrix of a block (some heads,
some units of the MLP) and the rows of the second matrix that belong to them; one sum over the ranks ends the block
(Shoeybi et al. 2019, arXiv 1909.08053). Which matrix is cut how is the plan that transformers has for the architecture,
`base_model_tp_plan`, carried out with DTensors. What is outside the plan (embedding, norms, last projection) is
computed by every rank of the group alike.
"""

import re
from collections.abc import Mapping
from typing import Any

import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

KEY = "tensor_parallel_size"
_STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    # a norm of single heads (batch, tokens, heads, head size): each rank has some heads, and their part of its gradient
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
}
_CUT_DIM = {"colwise": 0, "rowwise": 1}


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Spread a HuggingFace model over the ranks of a one-dimensional mesh, in place; its memory may be on "meta".

    Raises ValueError for an architecture without a plan, for a plan with a way to cut that is not known here, and for
    heads or widths that the ranks do not divide.
    """
    trunk = module.base_model
    plan = planned_layers(trunk, type(module).__name__)
    _check_sizes(trunk, plan, mesh.size())
    parallelize_module(trunk, mesh, {name: _STYLES[style] for name, style in plan.items()})


def planned_layers(trunk: nn.Module, model: str) -> dict[str, str]:
    """Name of each layer that is spread -> how. model: as messages call it. Raises ValueError as `tensor_parallel`."""
    source = f"base_model_tp_plan of transformers {transformers.__version__}"
    plan: Mapping[str, str] | None = trunk.config.base_model_tp_plan
    if not plan:
        raise ValueError(f"{model} has no plan for tensor parallelism ({source}): use {KEY} 1")
    layers = {}
    for name, layer in trunk.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None:
            continue
        if style not in _STYLES or (style in _CUT_DIM and not isinstance(layer, nn.Linear)):
            raise ValueError(
                f"{model}: {source} cuts {name}, a {type(layer).__name__}, as {style!r}, which is not built "
                f"(expected a Linear as one of {sorted(_STYLES)}): use {KEY} 1"
            )
        layers[name] = style
    _check_blocks(trunk, layers, f"{model}: {source}")
    return layers


def _check_blocks(trunk: nn.Module, layers: Mapping[str, str], source: str) -> None:
    """Every parameter inside a block that is cut must be in the plan: its gradient would be one rank's part only."""
    for block in dict.fromkeys(name.rpartition(".")[0] for name in layers):
        for parameter, _ in trunk.get_submodule(block).named_parameters():
            name = f"{block}.{parameter}".rpartition(".")[0]
            if name not in layers:
                raise ValueError(f"{source} does not say how {name} is spread: use {KEY} 1, or another version of it")


def _check_sizes(trunk: nn.Module, layers: Mapping[str, str], size: int) -> None:
    config: Any = trunk.config
    for key in ("num_attention_heads", "num_key_value_heads"):
        count = config.to_dict()[key]
        if count % size:
            raise ValueError(f"{KEY} {size} does not divide the model's {key} {count}")
    for name, style in layers.items():
        if style in _CUT_DIM:
            width = trunk.get_submodule(name).weight.shape[_CUT_DIM[style]]
            if width % size:
                raise ValueError(f"{KEY} {size} does not divide the width {width} of {name}")
