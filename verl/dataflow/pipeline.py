"""Pipeline: a compiled flow that runs batches through its operators."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

from verl import columns
from verl.dataflow.operator import HOLD, Operator, dependencies, running
from verl.dataflow.run import Observer, PipelineRun, Reports, Span, as_batch, require_columns
from verl.protocol import DataProto

logger = logging.getLogger("verl.dataflow")

HEARTBEAT_SECONDS = 60.0

RunReports = dict[int, tuple[Reports, int]]
"""Reports of one run: position of an operator (-1: the input) -> its reports, and the rows of the batch after it."""


class Pipeline:
    """A compiled flow. `run` sends one batch through it.

    Attributes:
        inputs: the columns that the batch given to `run` must have.
        timings: the seconds of each operator in the last run.
        spans: start and end of each operator of the last run, by `time.perf_counter`.
        running_since: operator name -> start by `time.perf_counter`, of the operators that are running.
        seconds: the wall time of the last run; less than the sum of `timings` if operators overlapped.
        observer: called as (operator name, seconds, batch) after each operator; batch: a shallow copy.
        log_level: level of the log line per operator.
        label: prefix of the operators' names, to distinguish them from those of another pipeline.
        processes_of: maps `Operator.on` to the processes that run it. Independent operators of different processes
            overlap. None (the attribute or its result): the thread that calls `run`.
    """

    def __init__(self, operators: tuple[Operator, ...], inputs: tuple[str, ...] = ()):
        self.operators = operators
        self.inputs = inputs
        self.spans: dict[str, Span] = {}
        self.running_since: Mapping[str, float] = {}
        self.seconds = 0.0
        self.observer: Observer | None = None
        self.processes_of: Callable[[str], Hashable | None] | None = None
        self.log_level = logging.INFO
        self.label = ""
        self._held: list[RunReports] = []  # reports of the runs that ended with HOLD
        self._stage = operators  # the operators that `run` executes
        self._dependencies = dependencies(operators)

    def __repr__(self) -> str:
        return f"Pipeline({' -> '.join(op.name for op in self.operators)})"

    def start_from(self, name: str) -> None:
        """Make `run` start at this operator, which must also be a source. Run those before it as a `stage`."""
        self._stage = self.operators[self._index(name) :]
        self._dependencies = dependencies(self._stage)

    def stage(self, first: str, last: str) -> "Pipeline":
        """A pipeline of the operators from `first` to `last`, both included."""
        return Pipeline(self.operators[self._index(first) : self._index(last) + 1])

    def _index(self, name: str) -> int:
        return [op.name for op in self.operators].index(name)

    @property
    def timings(self) -> dict[str, float]:
        spans = {op.name: self.spans[op.name] for op in self.operators if op.name in self.spans}
        return {name: end - start for name, (start, end) in spans.items()}

    def run(self, batch: DataProto | Mapping[str, Any] | None = None) -> Any:
        """Run the operators once.

        Args:
            batch: a DataProto or a mapping of columns, which is not modified; None if the first operator is a source.

        Returns:
            The batch after the last operator, or HOLD if an operator kept it. `meta_info["metrics"]` and `["timing"]`
            of the result hold the reports of all operators, of this run and of those before it that ended with HOLD
            (see `merge_reports`).
        """
        start = time.perf_counter()
        runs = self.pop_held_reports()  # now, because after an error the next run starts a new batch
        processes = [self.processes_of(op.on) if self.processes_of and op.on else None for op in self._stage]
        current = PipelineRun(
            *(self._stage, self._dependencies, processes, self._checked_input(batch)),
            *(self.observer, self.log_level, self.label),
        )
        self.spans, self.running_since = current.spans, current.running_since
        result: Any = None
        with heartbeat(current.running_since):
            while result is not HOLD and (ready := current.next()) is not None:
                i, op_input = ready
                op = self._stage[i]
                op_start = time.perf_counter()
                try:
                    with running(self.label + op.name):
                        result = op.func() if op_input is None else op.func(op_input.batch)
                except Exception as error:
                    current.annotate(i, error)
                    raise
                current.end(i, op_input, result, (op_start, time.perf_counter()))
        self.seconds = time.perf_counter() - start
        runs.append(current.reports)
        if result is HOLD:
            self._held = runs
            return HOLD
        metrics, timing = merge_reports(runs)
        current.batch.meta_info |= {"metrics": metrics, "timing": timing | self.timings}
        return current.batch

    def pop_held_reports(self) -> list[RunReports]:
        """Return and discard the reports of the runs since the last batch that `run` returned."""
        runs, self._held = self._held, []
        return runs

    def _checked_input(self, batch: DataProto | Mapping[str, Any] | None) -> DataProto | None:
        """A checked copy of the batch given to `run`; None if the first operator makes it."""
        first = self._stage[0]
        if batch is None and not first.is_source:
            raise ValueError(f"the flow's first operator {first.name!r} needs a batch: call run(batch)")
        if batch is None:
            return None
        if not first.accepts_batch:
            raise ValueError(f"the flow's first operator {first.name!r} makes the batch itself: call run()")
        current = as_batch(batch).copy()
        for op in self._stage:
            require_columns(current, [c for c in op.reads if c in self.inputs], op)
        columns.check(current)
        return current

    def state_dict(self) -> dict[str, Any]:
        """The state of every stateful operator, by operator name."""
        return {op.name: op.stateful.state_dict() for op in self.operators if op.stateful is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. Raises ValueError if the stateful operators of this flow differ."""
        stateful = {op.name: op.stateful for op in self.operators if op.stateful is not None}
        if set(stateful) != set(state):
            raise ValueError(
                f"the saved state belongs to the operators {sorted(state)}, this flow has {sorted(stateful)}: "
                "resume with the flow that was saved"
            )
        for name, owner in stateful.items():
            owner.load_state_dict(state[name])
        self._held = []  # the next run starts a new batch


@contextmanager
def heartbeat(running_since: dict[str, float]) -> Iterator[None]:
    """Log every minute which operators are still running, to distinguish a long one from a hang.

    Args:
        running_since: operator name -> start by `time.perf_counter`; read while the block runs, and empty after it.
    """
    ended = threading.Event()

    def log() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            for name, start in list(running_since.items()):
                logger.info("[%s] still running after %.0fs", name, time.perf_counter() - start)

    threading.Thread(target=log, name="flow heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        running_since.clear()  # after an error


# ---- metrics --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Total:
    """A count, such as of failed samples: the counts of several passes are added."""

    value: float


def merge_reports(runs: Sequence[RunReports]) -> tuple[dict[str, Any], dict[str, float]]:
    """Merge the metrics and the finer timings of several runs, in the order of the operators.

    A metric is a number, a pair (sum, count), or a `Total`. With an operator that holds the batch (dynamic sampling), a
    training step is several passes; its metrics describe all of them:

    - a pair (sum, count): the total sum over the total count; dropped if that is 0
    - a `Total`: the sum
    - a number whose name ends in `max` or `min` (`_max`, `/max`): the largest or smallest
    - any other number: the mean over the rows of the passes

    Raises:
        ValueError: a value is none of these kinds, or of different kinds in different passes.
    """
    metrics: dict[str, Any] = {}
    timing: dict[str, float] = {}
    for i in sorted({position for run in runs for position in run}):
        reported: dict[str, list[tuple[Any, int]]] = {}
        for reports, rows in (run[i] for run in runs if i in run):
            for name, value in reports["metrics"].items():
                reported.setdefault(name, []).append((value, rows))
            for name, seconds in reports["timing"].items():
                timing[name] = timing.get(name, 0.0) + seconds
        merged = {name: _merge(name, values) for name, values in reported.items()}
        metrics |= {name: value for name, value in merged.items() if value is not None}
    return metrics, timing


def _merge(name: str, values: list[tuple[Any, int]]) -> Any:
    if all(isinstance(value, tuple) and len(value) == 2 for value, _ in values):
        total, count = (sum(float(x) for x in parts) for parts in zip(*(value for value, _ in values)))
        return total / count if count else None
    if all(isinstance(value, Total) for value, _ in values):
        return float(sum(value.value for value, _ in values))
    if len(values) == 1:
        return values[0][0]
    numbers = [_number(name, value) for value, _ in values]
    if name.endswith(("_max", "/max")):
        return max(numbers)
    if name.endswith(("_min", "/min")):
        return min(numbers)
    rows = sum(rows for _, rows in values)
    return sum(number * weight for number, (_, weight) in zip(numbers, values)) / rows


def _number(name: str, value: Any) -> float:
    if isinstance(value, Real) or getattr(value, "numel", lambda: 0)() == 1:
        return float(value)
    raise ValueError(
        f"metric {name!r}: expected a number, a pair (sum, count) or a Total in every pass, found {value!r}"
    )
