"""Selects the method of the weight sync (`rollout.weight_sync`); `replica`."""

import torch

import verl.weight_sync as weight_sync  # loads a method at its first use
from verl.weight_sync.base import (
    InProcessSync,
    ReceivesWeights,
    SlicedWeights,
    SyncReport,
    WeightSource,
    WeightSync,
)
from verl.weight_sync.verify import Loading


class ReplicaSync(WeightSync):
    """The rollout engine in this process has an unsharded copy of the weights, gathered from all ranks.

    Args:
        rollout: the rollout engine.
        dtype: of the weights that are gathered; None: not cast.
        check_every: see `WeightSync`.
    """

    def __init__(
        self,
        rollout: ReceivesWeights,
        dtype: torch.dtype | None = None,
        check_every: int = 1,
    ):
        super().__init__(check_every)
        self.rollout = rollout
        self.dtype = dtype

    def _push(self, engine: WeightSource, version: int, compares: bool) -> SyncReport:
        loading = Loading(self.rollout.receiver(), version, compares)
        checksum = loading.load(engine.rollout_weights(self.dtype))
        self.rollout.weight_version = version
        return SyncReport(version, loading.bytes, checksum=checksum)


def local_sync(
    setting: str,
    engine: ReceivesWeights,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int,
    has_shards: bool = False,
    prefers_shards: bool = False,
    check_every: int = 1,
) -> WeightSync:
    """The sync of an engine that shares the trainer's device.

    Args:
        setting: `rollout.weight_sync`; check_every: the setting of this name.
        dtype: of the weights that are gathered; None: not cast.
        has_shards: whether the shards of the training engine can be read.
        prefers_shards: whether to read them for a full copy, too.

    Raises:
        ValueError: the method does not fit the engine.
    """
    receiver = engine.receiver()
    has_slices = setting in ("auto", "reshard") and has_shards and isinstance(receiver, SlicedWeights)
    methods = _methods(receiver, has_slices, prefers_shards)
    if setting not in ("auto", *methods):
        raise ValueError(
            f"rollout.weight_sync={setting}: {type(engine).__name__} on the devices of the trainer is synchronized "
            f"by {' or '.join(map(repr, methods))}: use auto or {methods[0]}"
        )
    method = methods[0] if setting == "auto" else setting
    if method == "in_process":
        return InProcessSync(engine)
    if method == "reshard":
        return weight_sync.ReshardSync(engine, device, bucket_bytes, check_every=check_every)
    return ReplicaSync(engine, dtype, check_every)


def _methods(receiver: object, has_slices: bool, prefers_shards: bool) -> list[str]:
    """The methods for a receiver, the one that `auto` chooses first. has_slices: whether its slices can be written."""
    if receiver is None:
        return ["in_process"]
    if not has_slices:
        return ["replica"]
    return ["reshard", "replica"] if receiver.prefers_slices or prefers_shards else ["replica", "reshard"]
