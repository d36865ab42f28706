"""DataFlow: an editable list of operators, checked before anything runs; and Pipeline: the compiled flow."""

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from verl import columns
from verl.dataflow.operator import HOLD, Operator, as_operator, dependencies, running
from verl.dataflow.run import Observer, PipelineRun, Reports, Span, as_batch, require_columns
from verl.protocol import DataProto
from verl.registry import check_type, did_you_mean, signature

logger = logging.getLogger("verl.dataflow")

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
        try:
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
        finally:
            current.running_since.clear()  # after an error
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
        """A checked copy of the batch given to `run`; None or an empty one, if the first operator makes it."""
        first = self._stage[0]
        if batch is None and not first.is_source and (first.reads or not first.writes):
            raise ValueError(f"the flow's first operator {first.name!r} needs a batch: call run(batch)")
        if batch is None:
            return None if first.is_source else DataProto()
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


# ---- the editable flow ----------------------------------------------------------------------------------------------


class DataFlow:
    """An editable list of operators. `compile` checks it and returns the `Pipeline` that runs it.

    flow = DataFlow([load_prompts])                # a plain function is an operator of the same name
    flow.add_operator(Operator("gen", generate, reads="prompts", writes="responses"))
    flow.add_operator(Operator("reward", score, reads="responses", writes="token_level_scores"))
    flow.insert_before("reward", Operator("log", report))
    pipeline = flow.compile()                      # ValueError if a column has no writer
    batch = pipeline.run()
    """

    def __init__(self, operators: Iterable["Operator | Callable"] = ()):
        self._operators: list[Operator] = []
        for operator in operators:
            self.add_operator(operator)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(op.name for op in self._operators)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self._operators)

    def __len__(self) -> int:
        return len(self._operators)

    def __repr__(self) -> str:
        return f"DataFlow({' -> '.join(self.names)})"

    def __getitem__(self, name: str) -> Operator:
        return self._operators[self._index(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def add_operator(self, operator: "Operator | Callable") -> "DataFlow":
        """Append an operator. Its name must be new."""
        return self._insert(len(self), operator)

    def insert_before(self, name: str, operator: "Operator | Callable") -> "DataFlow":
        """Insert an operator before the one called `name`."""
        return self._insert(self._index(name), operator)

    def insert_after(self, name: str, operator: "Operator | Callable") -> "DataFlow":
        """Insert an operator after the one called `name`."""
        return self._insert(self._index(name) + 1, operator)

    def replace(self, name: str, operator: "Operator | Callable") -> "DataFlow":
        """Replace the operator called `name`."""
        index, operator = self._index(name), as_operator(operator)
        if operator.name != name:
            self._require_new(operator.name)
        self._operators[index] = operator
        return self

    def configure(self, settings: Mapping[str, Mapping[str, Any]], key: str) -> "DataFlow":
        """Set keyword-only parameters of the functions of operators.

        Args:
            settings: operator name -> {parameter: value}.
            key: configuration key of `settings`, for messages.

        Raises:
            ValueError: no operator, or no keyword-only parameter, has such a name, or a value has another type.
        """
        for name, values in settings.items():
            if name not in self.names:
                raise ValueError(f"{key}.{name}: the flow has no such operator: {did_you_mean(name, self.names)}")
            operator = self[name]
            parameters = signature(operator.func).parameters
            settable = {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
            for setting, value in values.items():
                if setting not in settable:
                    raise ValueError(
                        f"{key}.{name}.{setting}: the operator {name!r} has no such keyword-only parameter: "
                        f"{did_you_mean(setting, settable)}"
                    )
                check_type(settable[setting], value, f"{key}.{name}.{setting}")
            self.replace(name, replace(operator, func=partial(operator.func, **values)))
        return self

    def remove(self, name: str) -> "DataFlow":
        """Remove the operator called `name`."""
        del self._operators[self._index(name)]
        return self

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"the flow has no operator {name!r}: {did_you_mean(name, self.names)}")
        return self.names.index(name)

    def _require_new(self, name: str) -> None:
        if name in self.names:
            raise ValueError(
                f"the flow already has an operator {name!r}: choose another name, Operator(name, function), or use "
                f"flow.replace({name!r}, ...)"
            )

    def _insert(self, index: int, operator: "Operator | Callable") -> "DataFlow":
        operator = as_operator(operator)
        self._require_new(operator.name)
        self._operators.insert(index, operator)
        return self

    def compile(self, inputs: Iterable[str] | None = None) -> "Pipeline":
        """Check the flow and return the pipeline that runs it.

        Args:
            inputs: the columns of the batch given to `Pipeline.run`. If the first operator is a source, its `writes`
                declare them. If neither is given, columns without a writer are required of the batch at `run`.

        Raises:
            ValueError: if a column has no writer before its reader. The message names operator and column.
        """
        if not self._operators:
            raise ValueError("the flow has no operators: add one with add_operator")
        for op in self._operators[1:]:
            if not op.accepts_batch:
                raise ValueError(
                    f"operator {op.name!r} takes no batch: only the first operator of a flow may be a source"
                )
        first = self._operators[0]
        pure_source = not first.accepts_batch
        start = set(inputs) if inputs is not None else set(first.writes) if pure_source and first.writes else None
        written: set[str] = set()
        needed: dict[str, None] = {}
        for i, op in enumerate(self._operators):
            for name in op.reads:
                if name in written:
                    continue
                if start is None or name not in start:
                    later = next((writer.name for writer in self._operators[i + 1 :] if name in writer.writes), None)
                    if later is not None:
                        raise ValueError(
                            f"operator {op.name!r} reads {name!r}, which {later!r} writes only after it; "
                            "if the column comes with the batch, declare it: compile(inputs=[...])"
                        )
                    if start is not None:
                        raise ValueError(
                            f"operator {op.name!r} reads {name!r}, but no upstream operator writes it: "
                            f"{did_you_mean(name, start | written)}"
                        )
                needed[name] = None
            written.update(op.writes)
        return Pipeline(tuple(self._operators), () if pure_source else tuple(needed))
