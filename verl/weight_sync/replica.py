"""`replica`: the rollout engine in the trainer's process has an unsharded copy of the weights."""

import time

from verl.weight_sync.adapters import push_parts
from verl.weight_sync.base import AdapterReceiver, ReceivesWeights, SyncReport, WeightSource, WeightSync
from verl.weight_sync.verify import Loading, fold


class ReplicaSync(WeightSync):
    """The rollout engine in this process has an unsharded copy of the weights, gathered from all ranks.

    Args:
        rollout: the rollout engine.
        adapters: whether adapters are sent separately from the base weights.
        bandwidth: bytes per second of a copy on this device, for the report.
        check_every: see `WeightSync`.
    """

    def __init__(self, rollout: ReceivesWeights, adapters: bool = False, bandwidth: float = 0.0, check_every: int = 1):
        super().__init__(check_every)
        self.rollout = rollout
        self.adapters = adapters
        self.bandwidth = bandwidth

    def _push(self, engine: WeightSource, version: int, compares: bool) -> SyncReport:
        start, size, checksums = time.perf_counter(), 0, []
        receiver = self.rollout.receiver()
        has_base = isinstance(receiver, AdapterReceiver) and receiver.has_base
        for part in push_parts(engine, self.adapters, has_base):
            loading = Loading(receiver, version, compares)
            checksums.append(loading.load(part))
            size += loading.bytes
        self.rollout.weight_version = version
        checksum = fold(checksums) if compares else 0
        return SyncReport(version, size, time.perf_counter() - start, checksum, self.bandwidth)
