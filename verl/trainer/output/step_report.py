"""StepReport: what is known of a finished training step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl.protocol import DataProto
from verl.registry import did_you_mean


@dataclass(frozen=True, repr=False)
class StepReport(Mapping[str, float]):
    """The metrics of one step as a mapping, `report["critic/score/mean"]`, with what else is known of the step.

    Attributes:
        step: number of the step; the first is 1.
        total_steps: number of the last step of the run.
        metrics: what `fit` logs for this step; includes timing_s/*.
        timings: seconds of each operator.
        batch: the batch after the last operator.
    """

    step: int
    total_steps: int
    metrics: dict[str, float]
    timings: dict[str, float]
    batch: DataProto

    def __getitem__(self, name: str) -> float:
        if name not in self.metrics:
            raise KeyError(f"step {self.step} has no metric {name!r}: {did_you_mean(name, self.metrics)}")
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def __repr__(self) -> str:
        rows = "".join(f"\n  {name}: {value:g}" for name, value in self.metrics.items())
        return f"step {self.step} of {self.total_steps}, {len(self.batch)} samples{rows}"
