"""Selects the method of the weight sync (`rollout.weight_sync`), and measures the bandwidth of a copy."""

import logging
import time
from typing import TYPE_CHECKING

import torch

import verl.weight_sync as weight_sync  # loads a method at its first use
from verl.weight_sync.base import (
    AdapterReceiver,
    InProcessSync,
    ReceivesWeights,
    RemoteReceiver,
    SlicedWeights,
    WeightSync,
)

if TYPE_CHECKING:
    from verl.weight_sync.reshard.grouping import HybridGroups

logger = logging.getLogger("verl.rollout")

_COPIED_BYTES = {"cuda": 256 * 2**20, "cpu": 8 * 2**20}  # of the measured copy


def local_sync(
    setting: str,
    engine: ReceivesWeights,
    device: torch.device,
    *,
    lora_sync: str = "auto",
    has_adapters: bool = False,
    dtype: torch.dtype | None = None,
    bucket_bytes: int,
    has_shards: bool = False,
    prefers_shards: bool = False,
    grouping: "HybridGroups | None" = None,
    check_every: int = 1,
) -> WeightSync:
    """The sync of an engine that shares the trainer's device.

    Args:
        setting: `rollout.weight_sync`; lora_sync and check_every are the settings of these names.
        engine: the rollout engine.
        device: of both.
        has_adapters: whether the policy is trained with LoRA.
        dtype: dtype in which weights are sent to other processes.
        bucket_bytes: max size of a bucket.
        has_shards: whether the shards of the training engine can be read.
        prefers_shards: whether to read them for a full copy, too.
        grouping: which ranks generate together.

    Raises:
        ValueError: the method does not fit the engine.
    """
    receiver = engine.receiver()
    accepts_adapters = isinstance(receiver, AdapterReceiver)
    has_slices = setting in ("auto", "reshard") and has_shards and isinstance(receiver, SlicedWeights)
    obstacle = receiver.obstacle() if has_slices else ""
    methods = _methods(receiver, has_slices and not obstacle, prefers_shards)
    if setting not in ("auto", *methods):
        raise ValueError(
            f"rollout.weight_sync={setting}: {type(engine).__name__} on the devices of the trainer is synchronized "
            f"by {' or '.join(map(repr, methods))}{obstacle and f', because {obstacle}'}: use auto or {methods[0]}"
        )
    method = methods[0] if setting == "auto" else setting
    if obstacle:
        logger.warning("rollout.weight_sync=auto: %s instead of reshard: %s", method, obstacle)
    if method == "in_process":
        return InProcessSync(engine)
    from verl.weight_sync.adapters import sends_adapters

    is_cheaper = method == "ipc" or (accepts_adapters and receiver.applies_adapters)
    adapters = sends_adapters(lora_sync, has_adapters, accepts_adapters, is_cheaper)
    if method == "reshard" and not adapters:
        sync = weight_sync.ReshardSync(engine, device, bucket_bytes, grouping=grouping, check_every=check_every)
        if sync.peers.size == 1:
            sync.bandwidth = copy_bandwidth(device)
        return sync
    if setting == "reshard":
        raise ValueError("rollout.weight_sync=reshard sends merged weights: set rollout.lora_sync=merged")
    if method == "ipc":
        bandwidth = copy_bandwidth(device)
        return weight_sync.IpcSync(engine, device, dtype, bucket_bytes, adapters, bandwidth, check_every=check_every)
    return weight_sync.ReplicaSync(engine, adapters, copy_bandwidth(device), check_every)


def _methods(receiver: object, has_slices: bool, prefers_shards: bool) -> list[str]:
    """The methods for a receiver, the one that `auto` chooses first. has_slices: whether its slices can be written."""
    if receiver is None:
        return ["in_process"]
    if isinstance(receiver, RemoteReceiver):
        return ["ipc"]
    if not has_slices:
        return ["replica"]
    return ["reshard", "replica"] if receiver.prefers_slices or prefers_shards else ["replica", "reshard"]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy on the device: the best of three."""
    source = torch.zeros(_COPIED_BYTES.get(device.type, _COPIED_BYTES["cpu"]), dtype=torch.uint8, device=device)
    target, seconds = torch.zeros_like(source), []
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return len(source) / min(seconds)
