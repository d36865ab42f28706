"""`replica`: the rollout engine in the same process has an unsharded copy, gathered from all ranks."""

import time

from verl.weight_sync.adapters import parts_of
from verl.weight_sync.base import AdapterReceiver, ReceivesWeights, SyncReport, WeightSource, WeightSync
from verl.weight_sync.checksums import fold
from verl.weight_sync.loading import Loading


class ReplicaSync(WeightSync):
    """The rollout engine in this process has a separate copy of the weights, filled by its receiver.

    Args:
        rollout: the rollout engine.
        adapters: whether adapters are sent separately from the base weights.
        bandwidth: bytes per second of a copy on this device, for the report.
    """

    def __init__(self, rollout: ReceivesWeights, adapters: bool = False, bandwidth: float = 0.0):
        self.rollout = rollout
        self.adapters = adapters
        self.bandwidth = bandwidth

    def push(self, engine: WeightSource, version: int) -> SyncReport:
        start, sent = time.perf_counter(), 0
        receiver = self.rollout.receiver()
        has_base = isinstance(receiver, AdapterReceiver) and receiver.has_base
        checksums = []
        for part in parts_of(engine, self.adapters, has_base):
            loading = Loading(receiver, version)
            checksums.append(loading.load(part))
            sent += loading.bytes
        self.rollout.weight_version = version
        return SyncReport(version, sent, time.perf_counter() - start, fold(checksums), self.bandwidth)
