"""Pipeline: a checked flow, which sends one batch after another through its operators."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from verl import columns
from verl.dataflow.one_pass import Observer, Pass, Span
from verl.dataflow.operator import HOLD, Operator
from verl.dataflow.order import turns
from verl.dataflow.results import as_batch, require_columns
from verl.dataflow.watch import watched
from verl.protocol import DataProto


class Pipeline:
    """A checked flow. `run` sends one batch through it.

    inputs: the columns that the batch given to `run` must have.
    timings: the seconds of each operator in the last run. spans: when each began and ended, by time.perf_counter.
    seconds: the time that the run took; where operators overlap it is less than their sum.
    observer: called with (operator name, seconds, batch) after each operator.
    place_of: from `Operator.on` to where that is: operators of different places overlap when they are independent.
    None in its stead, or as its answer, is the thread that calls `run`.
    """

    def __init__(self, operators: tuple[Operator, ...], inputs: tuple[str, ...] = ()):
        self.operators = operators
        self.inputs = inputs
        self.spans: dict[str, Span] = {}
        self.seconds = 0.0
        self.observer: Observer | None = None
        self.place_of: Callable[[str], Hashable | None] | None = None
        self._turns = turns(operators)

    @property
    def timings(self) -> dict[str, float]:
        spans = {op.name: self.spans[op.name] for op in self.operators if op.name in self.spans}
        return {name: end - start for name, (start, end) in spans.items()}

    def run(self, batch: DataProto | Mapping[str, Any] | None = None) -> Any:
        """One pass. Returns the batch as the last operator left it, or HOLD when an operator kept it.

        batch: a DataProto or a mapping of columns, which stays as it is; none when the first operator is a source.
        `meta_info["metrics"]` and `["timing"]` of the result hold what the operators reported and took. Those of a pass
        that was held end with it: the operator that held reports when it lets go.
        """
        start = time.perf_counter()
        way = Pass(self.operators, self._turns, self._places(), self._enter(batch), self.observer)
        self.spans = way.spans
        result: Any = None
        with watched(way.under_way):
            while result is not HOLD and (turn := way.next()) is not None:
                i, given = turn
                op, began = self.operators[i], time.perf_counter()
                try:
                    result = op.func() if given is None else op.func(given.batch)
                except Exception as error:
                    way.blame(i, error)
                    raise
                way.end(i, given, result, (began, time.perf_counter()))
        self.seconds = time.perf_counter() - start
        if result is HOLD:
            return HOLD
        reports = way.reports()
        way.batch.meta_info |= {"metrics": reports["metrics"], "timing": reports["timing"] | self.timings}
        return way.batch

    def _places(self) -> list[Hashable | None]:
        """Where each operator runs now."""
        return [self.place_of(op.on) if self.place_of and op.on is not None else None for op in self.operators]

    def _enter(self, batch: DataProto | Mapping[str, Any] | None) -> DataProto | None:
        """The batch that was given to `run`, checked; None where the first operator makes it."""
        first = self.operators[0]
        if batch is None and not first.is_source:
            raise ValueError(f"the flow's first operator {first.name!r} needs a batch: call run(batch)")
        if batch is None:
            return None
        if not first.takes_batch:
            raise ValueError(f"the flow's first operator {first.name!r} makes the batch itself: call run()")
        current = as_batch(batch).copy()
        for op in self.operators:
            require_columns(current, [c for c in op.reads if c in self.inputs], op)
        columns.check(current)
        return current

    def state_dict(self) -> dict[str, Any]:
        """The state of every stateful operator, by name."""
        return {op.name: op.stateful.state_dict() for op in self.operators if op.stateful is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave. Raises ValueError when this flow has other stateful operators."""
        stateful = {op.name: op.stateful for op in self.operators if op.stateful is not None}
        if set(stateful) != set(state):
            raise ValueError(
                f"the saved state is of the operators {sorted(state)}, this flow has {sorted(stateful)}: "
                "resume with the flow that was saved"
            )
        for name, owner in stateful.items():
            owner.load_state_dict(state[name])
