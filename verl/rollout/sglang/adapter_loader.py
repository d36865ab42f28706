"""Loads an adapter in SGLang's scheduler, and verifies it there."""

import gc
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from verl.rollout.weight_sync.checksums import sum_of_bits, wrap


@cache
def lora_manager(model: nn.Module) -> Any:
    """SGLang's LoRA manager for a model, which the model does not refer to."""
    from sglang.srt.lora.lora_manager import LoRAManager

    return next(found for found in gc.get_objects() if type(found) is LoRAManager and found.base_model is model)


def load_adapter(model: nn.Module, order: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """Replace the adapter, and write it to the buffers that SGLang multiplies with.

    Args:
        model: SGLang's model.
        order: `adapter`: its name, rank and modules; `sums`: layer -> sum of the bits of its matrices.
        tensors: its matrices by PEFT name. The factor of B A is 1.

    Returns:
        What differs from what was sent, or "".
    """
    from sglang.srt.lora.lora_registry import LoRARef

    manager, adapter = lora_manager(model), order["adapter"]
    name, rank = adapter["name"], adapter["rank"]
    reference = LoRARef(lora_id=name, lora_name=name, lora_path=name, pinned=False)
    if name in manager.loras:
        _check(manager.unload_lora_adapter(reference))
    config = {"r": rank, "lora_alpha": rank, "target_modules": adapter["modules"], "peft_type": "LORA"}
    copies = {key: tensor.clone() for key, tensor in tensors.items()}  # the trainer uses the memory again
    _check(manager.load_lora_adapter_from_tensors(reference, copies, config))
    manager.fetch_new_loras({name})
    return find_stale(manager, name, order["sums"])


def find_stale(manager: Any, name: str, sent: Mapping[str, int]) -> str:
    """Compare the bits of the buffers with those that were sent; returns the difference, or "".

    Not compared: tensor-parallel ranks, which have parts of the matrices.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return ""
    pool = manager.memory_pool
    slot = pool.get_buffer_id(name)
    for number in range(pool.num_layer):
        buffers = [each[number][slot] for kind in (pool.A_buffer, pool.B_buffer) for each in kind.values()]
        found = sum(int(sum_of_bits(buffer)) for buffer in buffers)
        if wrap(found) != wrap(sent.get(str(number), 0)):
            return f"the adapter of layer {number} does not have the bits that were sent: the engine's adapter is stale"
    return ""


def _check(result: Any) -> None:
    """Raise ValueError if SGLang reports a failure."""
    if not result.success:
        raise ValueError(result.error_message)
