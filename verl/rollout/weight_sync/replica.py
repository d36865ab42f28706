"""`replica`: the rollout engine in the same process has an unsharded copy, gathered from all ranks."""

import time
from collections.abc import Iterator

import torch

from verl.rollout.base import RolloutEngine
from verl.rollout.weight_sync.base import SyncReport, WeightSource, WeightSync, incomplete


class ReplicaSync(WeightSync):
    """The rollout engine in this process has a separate copy of the weights, filled by its receiver."""

    def __init__(self, rollout: RolloutEngine):
        self.rollout = rollout

    def push(self, engine: WeightSource, version: int) -> SyncReport:
        start, sent, complete = time.perf_counter(), 0, False

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal sent, complete
            for name, tensor in engine.weights():
                sent += tensor.numel() * tensor.element_size()
                yield name, tensor
            complete = True

        receiver = self.rollout.receiver()
        receiver.receive(counted(), version)
        if not complete:
            raise incomplete(receiver)
        self.rollout.weight_version = version
        return SyncReport(version, sent, time.perf_counter() - start)
