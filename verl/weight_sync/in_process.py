"""`in_process`: the rollout engine generates with the trainer's parameters."""

from verl.weight_sync.base import ReceivesWeights, SyncReport, WeightSource, WeightSync


class InProcessSync(WeightSync):
    """The rollout engine shares the trainer's parameters: nothing to copy."""

    def __init__(self, rollout: ReceivesWeights):
        self.rollout = rollout

    def push(self, engine: WeightSource, version: int) -> SyncReport:
        self.rollout.weight_version = version
        return SyncReport(version)
