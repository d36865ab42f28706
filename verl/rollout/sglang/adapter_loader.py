"""Loads an adapter in SGLang's scheduler, and reports what it stores."""

import gc
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from verl.weight_sync.verify import sum_of_bits


@cache
def lora_manager(model: nn.Module) -> Any:
    """SGLang's LoRA manager for a model, which the model does not refer to."""
    from sglang.srt.lora.lora_manager import LoRAManager

    return next(found for found in gc.get_objects() if type(found) is LoRAManager and found.base_model is model)


def load_adapter(
    model: nn.Module, adapter: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[int, int]]:
    """Replace the adapter, and write it to the buffers that SGLang multiplies with.

    Args:
        model: SGLang's model.
        adapter: its name, rank and modules.
        tensors: its matrices by PEFT name. The factor of B A is 1.

    Returns:
        LAYER.MODULE.MATRIX, such as 0.qkv_proj.A -> elements of its buffer, and sum of their bits. A tensor-parallel
        rank has a slice of some.
    """
    from sglang.srt.lora.lora_registry import LoRARef

    manager, name, rank = lora_manager(model), adapter["name"], adapter["rank"]
    reference = LoRARef(lora_id=name, lora_name=name, lora_path=name, pinned=False)
    if name in manager.loras:
        _check(manager.unload_lora_adapter(reference))
    config = {"r": rank, "lora_alpha": rank, "target_modules": adapter["modules"], "peft_type": "LORA"}
    copies = {key: tensor.clone() for key, tensor in tensors.items()}  # the trainer uses the memory again
    _check(manager.load_lora_adapter_from_tensors(reference, copies, config))
    manager.fetch_new_loras({name})
    pool = manager.memory_pool
    slot = pool.get_buffer_id(name)
    buffers = {
        f"{number}.{module}.{matrix}": buffer[slot]
        for matrix, modules in (("A", pool.A_buffer), ("B", pool.B_buffer))
        for module, layers in modules.items()
        for number, buffer in enumerate(layers)
    }
    return {key: (buffer.numel(), int(sum_of_bits(buffer))) for key, buffer in buffers.items()}


def _check(result: Any) -> None:
    """Raise ValueError if SGLang reports a failure."""
    if not result.success:
        raise ValueError(result.error_message)
