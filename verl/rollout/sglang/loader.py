"""Loads a push in SGLang's scheduler, and verifies it there.

SGLang calls `load` for each bucket (`custom_weight_loader`). An exception would end the scheduler, and with it the
trainer's process. So the outcome is written to a file, which the trainer reads (`read_outcomes`).
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.rollout.expert_names import ExpertNames
from verl.rollout.sglang.adapter_loader import load_adapter
from verl.rollout.sglang.images import forget_features
from verl.rollout.weight_sync.checksums import sum_of_bits, wrap

#: name of the instruction in a bucket: JSON as (n,) uint8
INSTRUCTION = "verl.instruction"


def instruction(
    outcome: Path,
    sums: dict[str, int] | None = None,
    dtype: torch.dtype | None = None,
    adapter: dict[str, Any] | None = None,
) -> torch.Tensor:
    """The instruction of one call.

    Args:
        outcome: prefix of the files for the outcomes; the rank is appended.
        sums: on the last call, `group_of` -> sum of the bits that were sent.
        dtype: on the last call, dtype of the weights that were sent.
        adapter: the parameters are those of an adapter, see `load_adapter`.
    """
    text = json.dumps({"outcome": str(outcome), "sums": sums, "dtype": str(dtype), "adapter": adapter})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def read_outcomes(outcome: Path, ranks: int) -> None:
    """Raise ValueError unless every rank has loaded the bucket of `instruction(outcome)`."""
    for rank in range(ranks):
        path = Path(f"{outcome}-{rank}")
        if not path.exists():
            raise ValueError(f"SGLang's rank {rank} did not load the weights")
        error = path.read_text(encoding="utf-8")
        path.unlink()
        if error:
            raise ValueError(f"SGLang's rank {rank} cannot load the weights: {error}")


def group_of(name: str) -> str:
    """The group of parameters that is compared as one: the layer, or the parameter itself outside of the layers.

    A fused parameter of SGLang, such as qkv_proj, is in the same layer as the parameters that it joins.
    """
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else name


def add_sums(sums: dict[str, Any], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Add the sums of bits of parameters to those of their groups."""
    for name, tensor in weights:
        group = group_of(name)
        sums[group] = sums.get(group, 0) + sum_of_bits(tensor)


# ---- in the scheduler -----------------------------------------------------------------------------------------------


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load one bucket into SGLang's model; the last item is the instruction."""
    (name, content), weights = named_tensors[-1], list(named_tensors[:-1])
    assert name == INSTRUCTION, name
    order = json.loads(bytes(content.tolist()))
    error = ""
    try:
        wait_before_unmapping()
        if order["adapter"] is not None:
            error = load_adapter(model, order, dict(weights))
        elif weights:
            names = ExpertNames({name for name, _ in model.named_parameters()})
            model.load_weights(item for name, tensor in weights for item in names.unfused(name, tensor))
        if order["adapter"] is None and order["sums"] is not None:
            forget_features()
            error = find_stale(model, order["sums"], order["dtype"])
        if content.is_cuda:
            torch.cuda.synchronize()  # the trainer uses the memory again
    except Exception as raised:
        error = "".join(traceback.format_exception_only(raised)).strip()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = Path(f"{order['outcome']}-{rank}")
    path.with_suffix(".part").write_text(error, encoding="utf-8")
    os.replace(path.with_suffix(".part"), path)


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


def find_stale(model: nn.Module, sent: dict[str, int], dtype: str) -> str:
    """Compare the bits of the model's parameters with those that were sent; returns the difference, or "".

    Sums do not depend on the order of the elements, so fused and permuted parameters have the sum of their parts, and
    padding is 0. Not compared: groups with parameters of another dtype than `dtype`, models whose layers have other
    names than HuggingFace's, and tensor-parallel ranks, which have parts of the parameters.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return ""
    found: dict[str, Any] = {}
    parameters = list(model.named_parameters())
    add_sums(found, parameters)
    converted = {group_of(name) for name, parameter in parameters if str(parameter.dtype) != dtype}
    if found.keys() != sent.keys():
        return ""
    stale = [group for group in found if group not in converted and wrap(int(found[group])) != wrap(sent[group])]
    if not stale:
        return ""
    return (
        f"the parameters of {', '.join(stale[:3])} do not have the bits that were sent: the engine's weights are stale"
    )
