"""The process group of an engine that spans ranks: who it is, and small sums over it."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def init_process_group(device: torch.device, timeout: float = 600.0) -> None:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; nothing when it is joined already.

    timeout: seconds that a collective may wait for the other ranks.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"a sharded engine needs the variables {missing}: a launcher or a worker group sets them")
    # gloo too on GPUs: shards that were moved to host memory are gathered and saved from there
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def reduce_values(
    values: list[float], op: dist.ReduceOp, device: torch.device, group: dist.ProcessGroup | None
) -> list:
    """Each value reduced over the group, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op, group)
    return tensor.tolist()
