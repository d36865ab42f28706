"""For programs that load and shard a model themselves: public verl's `verl.utils.fsdp_utils`, `verl.utils.model`."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from transformers import AutoConfig, GenerationConfig

from verl.engines.memory import move_optimizer


def get_init_weight_context_manager(
    use_meta_tensor: bool = True, mesh: DeviceMesh | None = None
) -> Callable[[], contextlib.AbstractContextManager]:
    """The context to load a model in: the host on the first rank (of the last dimension of a mesh), others "meta"."""
    rank = dist.get_rank() if mesh is None else mesh.get_coordinate()[-1]
    return functools.partial(torch.device, "meta" if use_meta_tensor and rank != 0 else "cpu")


def init_fn(x: nn.Module) -> nn.Module:
    """Allocate the parameters of a module on other ranks than the first."""
    return x if dist.get_rank() == 0 else x.to_empty(device=torch.get_default_device(), recurse=False)


def _layers(module: nn.Module, config: Mapping[str, Any] | None) -> set[type[nn.Module]]:
    """The classes that are units: those of `wrap_policy.transformer_layer_cls_to_wrap`, or of `_no_split_modules`."""
    policy = (config or {}).get("wrap_policy", config or {})
    names = policy.get("transformer_layer_cls_to_wrap") or getattr(module, "_no_split_modules", None) or ()
    return {type(each) for each in module.modules() if type(each).__name__ in names}


def get_fsdp_wrap_policy(module: nn.Module, config: Mapping[str, Any] | None = None, is_lora: bool = False) -> Any:
    """The units of FSDP as a wrap policy of torch: decoder layers, or modules of at least `min_num_params`."""
    if (config or {}).get("min_num_params", 0) > 0:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=config["min_num_params"])
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=_layers(module, config))


def apply_fsdp2(model: nn.Module, fsdp_kwargs: Mapping[str, Any], config: Mapping[str, Any] | None) -> None:
    """Shard every decoder layer, then the rest of the model, in place."""
    layers = _layers(model, config)
    for module in [each for each in model.modules() if type(each) in layers]:
        fully_shard(module, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)


def fsdp_version(model: nn.Module) -> int:
    """1 or 2; 0 for a model that is not sharded."""
    return 2 if isinstance(model, FSDPModule) else int(isinstance(model, FullyShardedDataParallel))


def fsdp2_load_full_state_dict(
    model: nn.Module,
    full_state: dict[str, torch.Tensor],
    device_mesh: DeviceMesh | None = None,
    cpu_offload: Any = None,
) -> None:
    """Load a whole state dict, that of the first rank, into a sharded model. cpu_offload: a policy, or None."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload is not None)
    set_model_state_dict(model, full_state, options=options)


def offload_fsdp_model_to_cpu(model: nn.Module, empty_cache: bool = True) -> None:
    """Move the shards of a model to the host. ValueError for FSDP1, whose flat parameters cannot be moved."""
    _move(model, "cpu")
    if empty_cache and torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_fsdp_model_to_gpu(model: nn.Module) -> None:
    """Move the shards of a model to the GPU of this process."""
    _move(model, torch.device("cuda", torch.cuda.current_device()))


def _move(model: nn.Module, device: str | torch.device) -> None:
    if fsdp_version(model) == 1:
        raise ValueError("offloading: expected a model of apply_fsdp2 or one that is not sharded, found one of FSDP1")
    model.to(device)


def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of an optimizer to the host."""
    move_optimizer(optimizer, torch.device("cpu"))


def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, device_id: int | str) -> None:
    """Move the state of an optimizer to a device."""
    move_optimizer(optimizer, torch.device(device_id))


# ---- models ---------------------------------------------------------------------------------------------------------


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set entries of a config of transformers, in place; a dictionary sets entries of a section."""
    for name, value in override_config_kwargs.items():
        if isinstance(value, Mapping):
            update_model_config(getattr(module_config, name), value)
        else:
            setattr(module_config, name, value)


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """The generation config of a model, or one from its config; None if it has neither."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        with contextlib.suppress(OSError):
            config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
            return GenerationConfig.from_model_config(config)
    return None


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Print the number of parameters of a model, in millions."""
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name or type(model).__name__} contains {count / 1e6:.2f}M parameters")
