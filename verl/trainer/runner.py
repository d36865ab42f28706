"""FlowRunner: runs the flow of a trainer once per step."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from verl.dataflow import HOLD, DataFlow, Pipeline
from verl.protocol import DataProto
from verl.trainer.guards.interruption import UnfinishedStep
from verl.trainer.view import RunView
from verl.utils.rng import rng_state, set_rng_state


class FlowRunner:
    """Runs all operators of a step in the thread of `fit`, one after the other. keeps_workers: whether workers may stay
    for another `fit`, and load a checkpoint while they run."""

    keeps_workers = True

    def __init__(self, view: RunView):
        self.view = view
        self.pipeline: Pipeline

    def compile(self, flow: DataFlow) -> Pipeline:
        """Compile the finished flow."""
        self.pipeline = flow.compile()
        return self.pipeline

    def run(self) -> tuple[DataProto, dict[str, float], float]:
        """Run the flow until it returns a batch.

        Returns:
            The batch, the seconds of each operator, and those of all runs.

        Raises:
            UnfinishedStep: the run is to end, and the step needs further samples.
        """
        timings, seconds = Counter[str](), 0.0
        while True:
            batch = self.pipeline.run()
            timings.update(self.pipeline.timings)
            seconds += self.pipeline.seconds
            if batch is not HOLD:
                self.view.source.update(batch)
                return batch, dict(timings), seconds
            if self.view.interrupted is not None:
                raise UnfinishedStep(self.view.step)

    def position(self) -> Any:
        """The state of the flow before a step, for `undo`."""
        return self.pipeline.state_dict(), rng_state()

    def undo(self, position: Any) -> None:
        """Undo what a failed step has changed in the flow."""
        self.pipeline.load_state_dict(position[0])
        set_rng_state(position[1])

    # ---- for flows that also run in the background ------------------------------------------------------------------

    def check_steps(self, steps: int | None) -> None:
        """Raise ValueError for a number of steps that `fit` cannot train."""
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(f"fit(steps={steps!r}): expected the number of steps to train, int >= 1")

    def reset(self) -> None:
        """Begin with new workers."""

    def reset_to(self, step: int, total_steps: int) -> None:
        """Begin after this number of completed steps."""

    def paused(self) -> AbstractContextManager[None]:
        """Context in which the rollout does nothing but what the block asks for."""
        return nullcontext()

    def stopping(self) -> AbstractContextManager[None]:
        """Context in which the workers end."""
        return nullcontext()

    def describe(self) -> dict[str, str]:
        """Lines for the summary of the run: topic -> description."""
        return {}
