"""Process groups, collectives and tensor parallelism of an engine that spans ranks.

Tensor parallelism shards the matrices of every layer over the ranks of a group, which compute the same tokens. Each
rank holds some columns of the first matrix of a block (some heads, some units of the MLP) and the matching rows of the
second; one all-reduce ends the block (Shoeybi et al. 2019, arXiv 1909.08053). `base_model_tp_plan` of transformers
defines how each matrix is sharded, with DTensors. Layers outside of the plan (embedding, norms, output layer) are
computed by every rank of the group.
"""

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from verl.modeling.huggingface import trunk_of
from verl.utils.rendezvous import join_default_group

#: timeout of collectives if none is configured. The caller of the workers has its own deadline: it ends a call that
#: hangs and prints the stacks of all ranks, which a rank that times out earlier would hide
_NO_TIMEOUT = timedelta(days=1)

# ---- process groups -------------------------------------------------------------------------------------------------


def init_process_group(device: torch.device, timeout: float | None = None) -> None:
    """Join the group described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, unless it is joined already.

    timeout: of collectives, in seconds; None: the controller detects hangs.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"a sharded engine needs the environment variables {missing}, which a launcher or a worker group sets"
        )
    # tensors in host memory (offloaded gradients, checkpoints) are reduced too
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_default_group(backend, _NO_TIMEOUT if timeout is None else timedelta(seconds=timeout))


def device_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks. Its groups get the timeout of the default group instead of torch's default."""
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    for name in names:
        dist.distributed_c10d._set_pg_timeout(timeout_of(dist.group.WORLD), mesh.get_group(name))
    return mesh


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a group's collectives, read from its CPU backend, which every group has."""
    return group._get_backend(torch.device("cpu")).options._timeout


def reduce_values(
    values: list[float], op: dist.ReduceOp, device: torch.device, group: dist.ProcessGroup | None
) -> list[float]:
    """Reduce each value over the group, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op, group)
    return tensor.tolist()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor on every rank (collective). An unsharded tensor is returned unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    for dim in range(tensor.device_mesh.ndim):  # one at a time: torch warns if it gathers over several
        placements = list(tensor.placements)
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


# ---- tensor parallelism ---------------------------------------------------------------------------------------------

KEY = "tensor_parallel_size"
_STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    # a norm of single heads (batch, tokens, heads, head size): each rank has some heads and their share of its gradient
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
}
_SHARDED_DIM = {"colwise": 0, "rowwise": 1}
#: numbers of heads, which the ranks share
_HEADS = ("num_attention_heads", "num_key_value_heads")


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a HuggingFace model over a one-dimensional mesh, in place. The model may be on "meta".

    Raises:
        ValueError: the architecture has no plan, the plan uses a style that is not supported here, or the group size
            does not divide a number of heads or a width.
    """
    plan, trunk = sharded_layers(module, mesh.size()), trunk_of(module)
    parallelize_module(trunk, mesh, {name: _STYLES[style] for name, style in plan.items()})


def sharded_layers(module: nn.Module, size: int) -> dict[str, str]:
    """Name of each layer sharded over `size` ranks -> its style. Raises like `tensor_parallel`."""
    if hasattr(module, "peft_config"):
        raise ValueError(f"LoRA is not supported with tensor parallelism: set {KEY}=1")
    trunk = trunk_of(module)
    plan = planned_layers(trunk, type(module).__name__)
    _check_sizes(trunk, plan, size)
    return plan


def planned_layers(trunk: nn.Module, model: str) -> dict[str, str]:
    """Name of each sharded layer -> its style. model: name for errors. Raises like `tensor_parallel`."""
    source = f"base_model_tp_plan of transformers {transformers.__version__}"
    plan: Mapping[str, str] | None = trunk.config.base_model_tp_plan
    layers = {}
    for name, layer in trunk.named_modules():
        style = (plan or {}).get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or isinstance(layer, nn.Embedding):  # every rank has all of the embedding
            continue
        if style not in _STYLES or (style in _SHARDED_DIM and not isinstance(layer, nn.Linear)):
            raise ValueError(
                f"{model}: {source} shards {name}, a {type(layer).__name__}, as {style!r}, which is not supported "
                f"(expected a Linear as one of {sorted(_STYLES)}): use {KEY} 1"
            )
        layers[name] = style
    if not layers or not trunk.config.to_dict().keys() >= {*_HEADS}:
        raise ValueError(f"{model} has no plan for tensor parallelism ({source}): use {KEY} 1")
    for block in dict.fromkeys(name.rpartition(".")[0] for name in layers):  # others would get incomplete gradients
        for parameter, _ in trunk.get_submodule(block).named_parameters():
            name = f"{block}.{parameter}".rpartition(".")[0]
            if name not in layers:
                raise ValueError(
                    f"{model}: {source} does not say how {name} is sharded: use {KEY} 1, or another version of it"
                )
    return layers


def _check_sizes(trunk: nn.Module, layers: Mapping[str, str], size: int) -> None:
    config: Any = trunk.config
    for key in _HEADS:
        count = config.to_dict()[key]
        if count % size:
            raise ValueError(f"{KEY} {size} does not divide the model's {key} {count}")
    for name, style in layers.items():
        if style in _SHARDED_DIM:
            width = trunk.get_submodule(name).weight.shape[_SHARDED_DIM[style]]
            if width % size:
                raise ValueError(f"{KEY} {size} does not divide the width {width} of {name}")
