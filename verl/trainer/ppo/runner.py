"""PPORunner: the flow of policy optimization, whose rollout gets the new weights in each step."""

from typing import Any

from verl.dataflow import DataFlow
from verl.trainer.ppo.flow import add_weight_sync, skip_old_log_prob
from verl.trainer.ppo.weights import RolloutWeights
from verl.trainer.runner import FlowRunner
from verl.trainer.view import RunView


class PPORunner(FlowRunner):
    """Runs generation and training one after the other.

    Args:
        view: the run.
        weights: the weights of the rollout.
    """

    def __init__(self, view: RunView, weights: RolloutWeights):
        super().__init__(view)
        self.weights = weights

    def finish(self, flow: DataFlow) -> DataFlow:
        """The last edit of a flow: operators that depend on how it is run."""
        return add_weight_sync(skip_old_log_prob(flow, self.view.config), self.view.config, self.weights)

    def undo(self, position: Any) -> None:
        self.weights.version = None  # the actor may have been updated
        super().undo(position)

    def reset(self) -> None:
        self.weights.reset()

    def reset_to(self, step: int, total_steps: int) -> None:
        self.weights.version = None
