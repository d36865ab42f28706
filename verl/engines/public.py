"""Helpers for models that a program shards itself with FSDP2, under the names of public verl."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from verl.engines.memory import HOST, HostMemory, move_optimizer
from verl.utils.device import get_device_id


def fsdp_version(model: torch.nn.Module) -> int:
    """2 for a model of `fully_shard`, 1 for FullyShardedDataParallel, 0 for any other."""
    return 2 if isinstance(model, FSDPModule) else int(isinstance(model, FullyShardedDataParallel))


def load_fsdp_model_to_gpu(model: torch.nn.Module, device: Any = None) -> None:
    """Move a model to this process' GPU, or another device, in place. ValueError for FullyShardedDataParallel."""
    if fsdp_version(model) == 1:
        raise ValueError("expected a model of fully_shard (FSDP2), found FullyShardedDataParallel: apply_fsdp2 shards")
    model.to(get_device_id() if device is None else device)


def offload_fsdp_model_to_cpu(model: torch.nn.Module, empty_cache: bool = True) -> None:
    """Move a model to host memory, in place. ValueError for FullyShardedDataParallel."""
    load_fsdp_model_to_gpu(model, HOST)
    if empty_cache and torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, device_id: int | str) -> None:
    """Move the optimizer state to a GPU, by its index."""
    move_optimizer(optimizer, HostMemory(), torch.device(device_id))


def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the optimizer state to host memory."""
    move_optimizer(optimizer, HostMemory(), HOST)


def get_init_weight_context_manager(
    use_meta_tensor: bool = True, mesh: Any = None
) -> Callable[[], AbstractContextManager]:
    """What makes the context to create a model in: weights on the first rank (of each shard group of a mesh) only."""
    rank = mesh.get_coordinate()[-1] if mesh is not None else use_meta_tensor and torch.distributed.get_rank()
    return lambda: torch.device("meta" if use_meta_tensor and rank else "cpu")


def apply_fsdp2(model: torch.nn.Module, fsdp_kwargs: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Shard a model with `fully_shard(**fsdp_kwargs)`, in place: its layers, its embedding unless tied, and itself.

    config: `wrap_policy.transformer_layer_cls_to_wrap`, names of the layers' classes; else those of the model.
    """
    names = (config.get("wrap_policy") or {}).get("transformer_layer_cls_to_wrap") or model._no_split_modules
    tied = getattr(model.config, "tie_word_embeddings", False)
    for part in [*model.modules()][1:]:
        if type(part).__name__ in ([names] if isinstance(names, str) else names) or (
            isinstance(part, torch.nn.Embedding) and not tied
        ):
            fully_shard(part, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)


def fsdp2_load_full_state_dict(
    model: torch.nn.Module, full_state: Mapping[str, Any], device_mesh: Any = None, cpu_offload: Any = None
) -> None:
    """Load the state dict of the whole model, which rank 0 has, into the shards. cpu_offload: they go to the host."""
    model.to_empty(device=get_device_id()) if torch.distributed.get_rank() else model.to(get_device_id())
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload is not None, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(full_state), options=options)
    for buffer in model.buffers():  # those that are not in the state dict
        torch.distributed.broadcast(buffer, src=0)
    if cpu_offload is not None:
        model.to(HOST)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(get_device_id())


def init_fn(module: torch.nn.Module) -> torch.nn.Module:
    """`param_init_fn` of FullyShardedDataParallel: ranks but the first make room for the weights that it sends."""
    return module.to_empty(device=get_device_id(), recurse=False) if torch.distributed.get_rank() else module


def get_fsdp_wrap_policy(module: torch.nn.Module, config: Mapping[str, Any] | None = None) -> Callable | None:
    """`auto_wrap_policy` of FullyShardedDataParallel: parts above `min_num_params`, or the layers of the model.

    config: `disable`, `min_num_params`, and `transformer_layer_cls_to_wrap`, names of the layers' classes.
    """
    settings = dict(config or {})
    if settings.get("disable"):
        return None
    if smallest := settings.get("min_num_params"):
        return functools.partial(size_based_auto_wrap_policy, min_num_params=smallest)
    names = settings.get("transformer_layer_cls_to_wrap") or getattr(module, "_no_split_modules", None) or ()
    layers = {type(part) for part in module.modules() if type(part).__name__ in names}
    if names and not layers:
        raise ValueError(f"transformer_layer_cls_to_wrap: no module of {type(module).__name__} is one of {[*names]}")
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers) if layers else None


# ---- sequence parallelism of one rank: that of more is a setting of the training engine ------------------------------


def ulysses_pad_and_slice_inputs(
    input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, sp_size: int = 1, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """The tokens of this rank. ValueError for more than one."""
    if sp_size != 1:
        raise ValueError(f"expected sp_size 1, found {sp_size}: set actor.ulysses_sequence_parallel_size instead")
    return input_ids, position_ids, 0


def gather_outputs_and_unpad(outputs: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """The outputs of all ranks: those of this one."""
    return outputs
