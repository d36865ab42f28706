"""Loads a push in SGLang's schedulers, and verifies it.

SGLang calls `load` on every rank for each bucket (`custom_weight_loader`), which verifies what it has received. An
exception would end the scheduler, and with it the trainer's process. So the outcome is written to a file, which the
trainer reads (`read_outcomes`). If the trainer compares what is stored with what it has sent (`find_stale`), the last
outcome has the sums of what the rank stores.
"""

import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.rollout.expert_names import ExpertNames
from verl.rollout.sglang.images import forget_features
from verl.weight_sync.verify import sum_of_bits, wrap

#: name of the instruction in a bucket: JSON as (n,) uint8
INSTRUCTION = "verl.instruction"
#: rank's parameter or matrix -> (elements, sum of their bits); None instead of the sum: of another dtype than was sent
Stored = Mapping[str, tuple[int, int | None]]
_KV = re.compile(r"\.[kv]_proj\.")


def instruction(
    outcome: Path, sums: Mapping[str, int], dtype: torch.dtype | None = None, adapter: dict[str, Any] | None = None
) -> torch.Tensor:
    """The instruction of one call.

    Args:
        outcome: prefix of the files for the outcomes; the rank is appended.
        sums: name -> sum of the bits of every tensor in the bucket.
        dtype: of the weights of a push, on its last call, if the rank must report what it stores.
        adapter: the tensors are those of an adapter, see `load_adapter`.
    """
    order = {"outcome": str(outcome), "sums": sums, "dtype": dtype and str(dtype), "adapter": adapter}
    return torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)


def read_outcomes(outcome: Path, ranks: int) -> list[Stored]:
    """What each rank stores, if the instruction asks for it.

    Raises:
        ValueError: a rank has not loaded the bucket of `instruction(outcome)`.
    """
    stored = []
    for rank in range(ranks):
        path = Path(f"{outcome}-{rank}")
        if not path.exists():
            raise ValueError(f"SGLang's rank {rank} did not load the weights")
        result = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        if result["error"]:
            raise ValueError(f"SGLang's rank {rank} cannot load the weights: {result['error']}")
        stored.append(result["stored"])
    return stored


def sums_of_bits(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Name -> sum of the bits of each tensor."""
    sums = {name: sum_of_bits(tensor) for name, tensor in tensors}
    return dict(zip(sums, torch.stack([*sums.values()]).tolist())) if sums else {}


# ---- comparison of what is stored with what was sent ----------------------------------------------------------------


def group_of(name: str) -> str:
    """The group of parameters that is compared as one: the layer, or the parameter itself outside of the layers.

    A fused parameter of SGLang, such as qkv_proj, is in the same layer as the parameters that it joins.
    """
    layer = re.match(r"(.*?\.\d+)\.", name)
    return layer[1] if layer else name


def is_stored(ranks: Sequence[int], sent: Mapping[str, int]) -> bool:
    """Whether the ranks of a tensor-parallel group store the bits that were sent.

    Each has all of them, or they have them together. With fewer key/value heads than ranks, several have the same head.

    Args:
        ranks: sum of bits on each rank.
        sent: name -> sum of bits.
    """
    total, heads = sum(sent.values()), sum(bits for name, bits in sent.items() if _KV.search(name))
    if all(wrap(bits) == wrap(total) for bits in ranks):
        return True
    return wrap(sum(ranks)) in {wrap(total + copies * heads) for copies in range(len(ranks))}


def find_stale(ranks: Sequence[Stored], sent: Mapping[str, tuple[int, int]]) -> list[str]:
    """The parameters, or groups of them, that do not store the bits that were sent.

    Sums do not depend on the order of the elements, so fused and permuted parameters have the sum of what was loaded
    into them, and padding is 0. A parameter that is sent and stored by one name and with one size is compared by
    itself, the others of a layer together.

    Not compared: models whose layers have other names than HuggingFace's, groups with parameters of another dtype than
    was sent, and, with several ranks, groups that replicate more than key/value heads.

    Args:
        ranks: what each rank stores.
        sent: name -> (elements, sum of bits).
    """
    if {group_of(name) for name in ranks[0]} != {group_of(name) for name in sent}:
        return []
    whole = {name for name, (size, _) in ranks[0].items() if name in sent and sent[name][0] == size}
    groups: dict[str, tuple[list[str], list[str]]] = {name: ([name], [name]) for name in whole}
    for names, side in ((ranks[0], 0), (sent, 1)):
        for name in names:
            if name not in whole:
                groups.setdefault(group_of(name), ([], []))[side].append(name)
    return [group for group, (stored, names) in groups.items() if _is_stale(ranks, stored, {n: sent[n] for n in names})]


def _is_stale(ranks: Sequence[Stored], stored: list[str], sent: Mapping[str, tuple[int, int]]) -> bool:
    """Whether parameters of SGLang do not store the bits of those that were sent. False: they cannot be compared."""
    sums_of_ranks = [[rank[name][1] for name in stored] for rank in ranks]
    if any(bits is None for sums in sums_of_ranks for bits in sums):
        return False
    if is_stored([sum(sums) for sums in sums_of_ranks], {name: bits for name, (_, bits) in sent.items()}):
        return False
    if len(ranks) == 1 or len(stored) == len(sent) == 1:
        return True
    size = sum(rank[name][0] for rank in ranks for name in stored) - sum(size for size, _ in sent.values())
    heads = sum(size for name, (size, _) in sent.items() if _KV.search(name))
    return size in {copies * heads for copies in range(len(ranks))}


# ---- in the scheduler -----------------------------------------------------------------------------------------------


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load one bucket into SGLang's model; the last item is the instruction."""
    (name, content), weights = named_tensors[-1], list(named_tensors[:-1])
    assert name == INSTRUCTION, name
    order = json.loads(bytes(content.tolist()))
    outcome: dict[str, Any] = {"error": "", "stored": {}}
    try:
        wait_before_unmapping()
        check_received(weights, order["sums"])
        if order["adapter"] is not None:
            outcome["stored"] = load_adapter(model, order["adapter"], dict(weights))
        elif weights:
            names = ExpertNames({name for name, _ in model.named_parameters()})
            model.load_weights(item for name, tensor in weights for item in names.unfused(name, tensor))
            forget_features()
        if order["dtype"] is not None:
            stored = dict(model.named_parameters())
            sums = sums_of_bits(item for item in stored.items() if str(item[1].dtype) == order["dtype"])
            outcome["stored"] = {name: (tensor.numel(), sums.get(name)) for name, tensor in stored.items()}
        if content.is_cuda:
            torch.cuda.synchronize()  # the trainer uses the memory again
    except Exception as raised:
        outcome["error"] = "".join(traceback.format_exception_only(raised)).strip()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = Path(f"{order['outcome']}-{rank}")
    path.with_suffix(".part").write_text(json.dumps(outcome), encoding="utf-8")
    os.replace(path.with_suffix(".part"), path)


def check_received(tensors: Sequence[tuple[str, torch.Tensor]], sent: Mapping[str, int]) -> None:
    """Raise ValueError unless this rank has received the tensors that were sent, bit by bit."""
    received = sums_of_bits(tensors)
    if wrong := [name for name in {**sent, **received} if received.get(name) != sent.get(name)]:
        raise ValueError(
            f"expected the bits that were sent, found others in {len(wrong)} of {len(sent)} tensors, first {wrong[:3]}"
        )


def wait_before_unmapping() -> None:
    """Let the memory saver wait for the GPU before it frees memory.

    SGLang 0.5.15 frees the KV cache and the weights while kernels that use them may still be running, which ends in an
    illegal memory access on a busy GPU (sgl-project/sglang#31073).
    """
    package = sys.modules.get("torch_memory_saver")
    if package is None or "pause" in vars(package.torch_memory_saver):
        return
    saver = package.torch_memory_saver
    pause = saver.pause

    def waiting(tag: str | None = None) -> None:
        torch.cuda.synchronize()
        pause(tag=tag)

    saver.pause = waiting


# ---- adapters --------------------------------------------------------------------------------------------------------


@cache
def lora_manager(model: nn.Module) -> Any:
    """SGLang's LoRA manager for a model, which the model does not refer to."""
    from sglang.srt.lora.lora_manager import LoRAManager

    return next(each for each in gc.get_objects() if type(each) is LoRAManager and each.base_model is model)


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
