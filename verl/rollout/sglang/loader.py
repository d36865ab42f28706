"""Loads a push in SGLang's schedulers, and verifies it.

SGLang calls `load` on every rank for each bucket (`custom_weight_loader`), which verifies what it has received. An
exception would end the scheduler, and with it the trainer's process. So the outcome is written to a file, which the
trainer reads (`check_outcomes`). Whether SGLang computes with the weights is the question of the trainer's canary.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from verl.rollout.expert_names import ExpertNames
from verl.weight_sync.verify import sum_of_bits

#: name of the instruction in a bucket: JSON as (n,) uint8
INSTRUCTION = "verl.instruction"


def instruction(outcome: Path, sums: Mapping[str, int]) -> torch.Tensor:
    """The instruction of one call.

    Args:
        outcome: prefix of the files for the outcomes; the rank is appended.
        sums: name -> sum of the bits of every tensor in the bucket.
    """
    order = {"outcome": str(outcome), "sums": sums}
    return torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)


def check_outcomes(outcome: Path, ranks: int) -> None:
    """Raise ValueError if a rank has not loaded the bucket of `instruction(outcome)`."""
    for rank in range(ranks):
        path = Path(f"{outcome}-{rank}")
        if not path.exists():
            raise ValueError(f"SGLang's rank {rank} did not load the weights")
        result = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        if result["error"]:
            raise ValueError(f"SGLang's rank {rank} cannot load the weights: {result['error']}")


def sums_of_bits(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Name -> sum of the bits of each tensor."""
    sums = {name: sum_of_bits(tensor) for name, tensor in tensors}
    return dict(zip(sums, torch.stack([*sums.values()]).tolist())) if sums else {}


# ---- in the scheduler -----------------------------------------------------------------------------------------------


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load one bucket into SGLang's model; the last item is the instruction."""
    (name, content), weights = named_tensors[-1], list(named_tensors[:-1])
    assert name == INSTRUCTION, name
    order = json.loads(bytes(content.tolist()))
    outcome = {"error": ""}
    try:
        wait_before_unmapping()
        check_received(weights, order["sums"])
        if weights:
            names = ExpertNames({name for name, _ in model.named_parameters()})
            model.load_weights(item for name, tensor in weights for item in names.unfused(name, tensor))
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
