"""`in_process`: the rollout engine generates with the trainer's parameters."""

from verl.rollout.base import RolloutEngine
from verl.rollout.weight_sync.base import SyncReport, WeightSource, WeightSync


class InProcessSync(WeightSync):
    """The rollout engine shares the trainer's parameters: nothing to copy."""

    def __init__(self, rollout: RolloutEngine):
        self.rollout = rollout

    def push(self, engine: WeightSource, version: int) -> SyncReport:
        self.rollout.weight_version = version
        return SyncReport(version)
