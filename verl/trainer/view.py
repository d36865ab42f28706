"""RunView and StepReport: what guards, logs and checkpoints see of a run and of a step."""

import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config.fields import Schema
from verl.registry import did_you_mean

if TYPE_CHECKING:
    from verl.data.order import PromptSource
    from verl.dataflow import Pipeline
    from verl.protocol import DataProto
    from verl.single_controller import WorkerGroup
    from verl.trainer.checks.preflight import Run
    from verl.trainer.state.checkpointing import Checkpointer


@dataclass
class RunView:
    """The state of a run. The trainer writes it; others read it, and call the methods of `checkpointer`.

    Attributes:
        run: settings, inputs and cluster.
        source: the batches of training prompts.
        roles: role -> worker group; empty before the workers start.
        folder: trainer.default_local_dir.
        total_steps: number of the last step.
        unwatched: operators that limit their waits themselves.
        checkpointer: saves the run: `save(step)`, `wait()`, `newest()`.
        pipelines: the flow of a step, and that of the validation if there is one.
        step: number of completed steps; inside of a step, its number.
        failed_step: the step that has failed, if the last one did.
        metrics: metrics of the last step.
        ready: whether workers are started and the checkpoint is loaded; later errors are not setup errors.
        interrupted: SIGINT or SIGTERM, once it was received.
        stop_reason: why a guard ends the run; None while none does.
        has_failed: whether it does because something is wrong.
        restarts: number of restarts of this `fit`.
    """

    run: "Run"
    source: "PromptSource"
    roles: "Mapping[str, WorkerGroup]"
    folder: Path
    total_steps: int
    unwatched: Collection[str] = ()
    checkpointer: "Checkpointer" = field(init=False)
    pipelines: "list[Pipeline]" = field(default_factory=list)
    step: int = 0
    failed_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    ready: bool = False
    interrupted: signal.Signals | None = None
    stop_reason: str | None = None
    has_failed: bool = False
    restarts: int = 0

    @property
    def config(self) -> Schema:
        return self.run.config

    @property
    def attempted_step(self) -> int:
        """The step that failed, if the last one did; otherwise `step`."""
        return self.step if self.failed_step is None else self.failed_step

    @property
    def end_reason(self) -> str | None:
        """Why the run has ended; None while there are further steps."""
        return f"all {self.total_steps} steps are done" if self.step >= self.total_steps else self.stop_reason

    def running_operators(self) -> Mapping[str, float]:
        """Operators that are running -> start by `time.perf_counter`."""
        return {p.label + name: start for p in self.pipelines for name, start in dict(p.running_since).items()}


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
    batch: "DataProto"

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
