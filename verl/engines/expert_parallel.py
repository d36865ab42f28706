"""Shards the experts of a model over the ranks of a group, and each rank's share of them by FSDP2."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PretrainedConfig

from verl.modeling.expert_parallel import ExpertRanks
from verl.modeling.huggingface import experts_of
from verl.modeling.moe import expert_modules, install_routing, set_experts_function

KEY = "expert_parallel_size"
#: the dimension of the mesh over which experts are distributed
EXPERT = "expert"


def check_ranks(size: int, tensor: int, shard: int) -> None:
    """Raise ValueError if ranks cannot share experts.

    Args:
        size: ranks that share the experts of a layer.
        tensor: `tensor_parallel_size`.
        shard: ranks over which FSDP shards a parameter.
    """
    if tensor > 1:
        raise ValueError(f"{KEY}={size} is not supported with tensor_parallel_size={tensor}: set one of them to 1")
    if shard % size:
        raise ValueError(f"{KEY}={size} does not divide the {shard} ranks that FSDP shards over (fsdp_size)")


def check_experts(config: PretrainedConfig, size: int, ranks: int) -> None:
    """Raise ValueError if `expert_parallel_size` does not fit the model or the number of ranks."""
    if size == 1:
        return
    experts = experts_of(config)
    if not experts:
        raise ValueError(f"{KEY}={size}, but {config.model_type} models have no experts: use {KEY}=1")
    if ranks % size:
        raise ValueError(f"{KEY}={size} does not divide the number of ranks, {ranks}")
    if experts % size:
        raise ValueError(f"{KEY}={size} does not divide the model's {experts} experts")


def supported_experts(module: nn.Module, size: int) -> list[nn.Module]:
    """The modules with the experts that `size` ranks share.

    Raises:
        ValueError: the model has no such experts, they have adapters, or the ranks do not divide them.
    """
    experts = expert_modules(module)
    if install_routing(module) is None or not experts:
        raise ValueError(
            f"{KEY}={size}: {type(module).__name__} has no experts that are supported (Qwen3-MoE, Qwen2-MoE, OLMoE, "
            f"Mixtral): use {KEY}=1"
        )
    if experts[0].num_experts % size:
        raise ValueError(f"{KEY}={size} does not divide the model's {experts[0].num_experts} experts")
    if any(name.endswith(".base_layer") for name, child in module.named_modules() if child in experts):
        raise ValueError(
            f"{KEY}={size}: experts with LoRA adapters are not distributed over ranks: use {KEY}=1, or remove "
            "model.target_parameters"
        )
    return experts


def shard_experts(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Distribute the experts, in place. The module may be on "meta".

    Args:
        mesh: its last dimension, EXPERT, has the ranks that share the experts; FSDP uses the others.
        options: arguments of `fully_shard`.

    Raises:
        ValueError: see `supported_experts`.
    """
    size = mesh[EXPERT].size()
    experts = supported_experts(module, size)
    for layer in experts:
        for name, parameter in list(layer.named_parameters()):
            share = distribute_tensor(parameter.detach(), mesh[EXPERT], [Shard(0)], src_data_rank=None)
            layer.register_parameter(name, nn.Parameter(share, requires_grad=parameter.requires_grad))
        fully_shard(layer, mesh=mesh[mesh.mesh_dim_names[:-1]], **options)
    group: dist.ProcessGroup = mesh.get_group(EXPERT)
    # FSDP averages over the ranks with the same experts only, which are `size` times fewer than all ranks
    compute = partial(experts[0].forward.func, **experts[0].forward.keywords)
    set_experts_function(module, ExpertRanks(group, size, gradient_scale=1 / size, compute=compute))
