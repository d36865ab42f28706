"""The flow: a list of named functions that a batch passes through. The trainers run on this and nothing else.

    flow = DataFlow()
    flow.add_operator(Operator("gen", generate, writes=("responses",)))
    flow.add_operator(Operator("reward", score, reads=("responses",), writes=("token_level_scores",)))
    flow.add_operator(report)                        # a plain function is an operator of its own name
    batch = flow.compile().run(prompts)

What a function returns decides what happens to the batch:

- `writes` declared: the result (a DataProto, or a mapping of columns) is *added* to the batch;
- no `writes`: the result *is* the batch from there on (repeat, filter, reorder);
- None: the batch goes on unchanged (monitors, updates);
- HOLD: the operator keeps the batch and the pass ends here (dynamic sampling).

A function gets the batch in containers of its own: columns reach the flow by being returned, and those of an operator
with `writes` by being declared. Facts (`meta_info`) that it sets on the batch it was given, or on the one it returns,
go on in every case; `meta_info["metrics"]` and `["timing"]` are merged over the flow.

Execution is eager and in list order: the stack trace of a failing function is fit -> run -> that function.
"""

import functools
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from verl import columns
from verl.columns import DataProtoValidationError, callable_name, describe_source
from verl.protocol import MERGED_FACTS, DataProto
from verl.registry import did_you_mean

logger = logging.getLogger("verl.dataflow")


class _Hold:
    """The type of HOLD."""

    def __repr__(self) -> str:
        return "HOLD"


HOLD = _Hold()


class Stateful(ABC):
    """An object that keeps something between steps; checkpoints carry its state.

    As operator function stands the object itself (it has a `__call__`) or one of its methods.
    """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Operator:
    """A named step of a flow.

    func: takes the batch (or nothing, for a source) and returns as the module's docstring says.
    reads / writes: the columns it needs and adds; one name may stand as a plain string.
    Raises ValueError when `func` cannot be called so, before anything runs.
    """

    name: str
    func: Callable[..., Any]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"an operator's name is a non-empty string, found {self.name!r}")
        if not callable(self.func):
            raise ValueError(f"operator {self.name!r}: expected a function, found {type(self.func).__name__}")
        if not (self.takes_batch or self.is_source):
            raise ValueError(
                f"operator {self.name!r}: expected a function of the batch alone, found "
                f"{callable_name(self.func)}{inspect.signature(self.func)}; functools.partial fills in the rest"
                f"{describe_source(self.func)}"
            )
        object.__setattr__(self, "reads", self._column_names("reads", self.reads))
        object.__setattr__(self, "writes", self._column_names("writes", self.writes))

    def _column_names(self, what: str, names: Any) -> tuple[str, ...]:
        names = (names,) if isinstance(names, str) else tuple(names)
        if wrong := [n for n in names if not isinstance(n, str)]:
            raise ValueError(f"operator {self.name!r}: {what} are names of columns, found {wrong[0]!r}")
        return names

    @property
    def takes_batch(self) -> bool:
        """Whether the function can be called with the batch alone."""
        return _can_be_called(self.func, None)

    @property
    def is_source(self) -> bool:
        """Whether the function can be called with nothing, and makes the batch."""
        return _can_be_called(self.func)

    @property
    def stateful(self) -> Stateful | None:
        """The object behind the function that has a state to save."""
        func = self.func
        while isinstance(func, functools.partial):
            func = func.func
        owner = func.__self__ if isinstance(func, MethodType) else func
        return owner if isinstance(owner, Stateful) else None


def _can_be_called(func: Callable, *args: Any) -> bool:
    try:
        inspect.signature(func).bind(*args)
    except TypeError:
        return False
    return True


def as_operator(step: "Operator | Callable") -> Operator:
    """An operator as it is; a plain function becomes the operator of its own name."""
    if isinstance(step, Operator):
        return step
    if not callable(step):
        raise ValueError(f"a flow is made of Operators and functions, found {type(step).__name__}: {step!r}")
    return Operator(callable_name(step), step)


class DataFlow:
    """An editable list of operators. `compile` checks it and gives the Pipeline that runs."""

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

    def __getitem__(self, name: str) -> Operator:
        return self._operators[self._index(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def add_operator(self, operator: "Operator | Callable") -> "DataFlow":
        """Append an operator; its name must be new."""
        return self._insert(len(self), operator)

    def insert_before(self, name: str, operator: "Operator | Callable") -> "DataFlow":
        """Put an operator in front of the one called `name`."""
        return self._insert(self._index(name), operator)

    def insert_after(self, name: str, operator: "Operator | Callable") -> "DataFlow":
        """Put an operator behind the one called `name`."""
        return self._insert(self._index(name) + 1, operator)

    def replace(self, name: str, operator: "Operator | Callable") -> "DataFlow":
        """Put an operator in the place of the one called `name`."""
        at, operator = self._index(name), as_operator(operator)
        if operator.name != name:
            self._require_new(operator.name)
        self._operators[at] = operator
        return self

    def remove(self, name: str) -> "DataFlow":
        """Take the operator called `name` out."""
        del self._operators[self._index(name)]
        return self

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"the flow has no operator {name!r}: {did_you_mean(name, self.names)}")
        return self.names.index(name)

    def _require_new(self, name: str) -> None:
        if name in self.names:
            raise ValueError(
                f"the flow has an operator {name!r} already, and operators are edited by name: "
                "give this one another, Operator(name, function)"
            )

    def _insert(self, at: int, operator: "Operator | Callable") -> "DataFlow":
        operator = as_operator(operator)
        self._require_new(operator.name)
        self._operators.insert(at, operator)
        return self

    def compile(self, inputs: Iterable[str] | None = None) -> "Pipeline":
        """Check the flow and return what runs it.

        inputs: the columns that the batch given to `run` has. A flow whose first operator is a source declares them
        by that operator's `writes`. When neither says, the columns that nobody writes are asked of the batch at `run`.
        Raises ValueError that names operator and column when a column has no writer, or only a later one.
        """
        if not self._operators:
            raise ValueError("the flow has no operators: add one with add_operator")
        for op in self._operators[1:]:
            if not op.takes_batch:
                raise ValueError(
                    f"operator {op.name!r} takes no batch: only the first operator of a flow may be a source"
                )
        first = self._operators[0]
        pure_source = not first.takes_batch
        start = set(inputs) if inputs is not None else set(first.writes) if pure_source and first.writes else None
        written: set[str] = set()
        needed: dict[str, None] = {}
        for i, op in enumerate(self._operators):
            for name in op.reads:
                if name in written:
                    continue
                if start is None or name not in start:
                    self._require_writer(op, name, self._operators[i + 1 :], None if start is None else start | written)
                needed[name] = None
            written.update(op.writes)
        return Pipeline(tuple(self._operators), () if pure_source else tuple(needed))

    def _require_writer(self, op: Operator, name: str, later: list[Operator], known: set[str] | None) -> None:
        """Nothing before `op` writes the column `name`: that is right only when it may come with the batch."""
        for writer in later:
            if name in writer.writes:
                raise ValueError(
                    f"operator {op.name!r} reads {name!r}, which {writer.name!r} writes only after it; "
                    "if it comes with the batch, say so: compile(inputs=[...])"
                )
        if known is not None:
            raise ValueError(f"operator {op.name!r} reads {name!r}, which nobody writes: {did_you_mean(name, known)}")


def edges(operators: Iterable[Operator]) -> list[tuple[str, str, str]]:
    """(writer, reader, column) of every column that travels: B depends on A when B reads what A wrote last."""
    writer: dict[str, str] = {}
    found = []
    for op in operators:
        found += [(writer[c], op.name, c) for c in op.reads if c in writer]
        writer |= {c: op.name for c in op.writes}
    return found


class Pipeline:
    """A checked flow. `run` sends one batch through it.

    inputs: the columns that the batch given to `run` must have.
    timings: the seconds of each operator in the last run.
    observer: called with (operator name, seconds, batch) after each operator.
    """

    def __init__(self, operators: tuple[Operator, ...], inputs: tuple[str, ...] = ()):
        self.operators = operators
        self.inputs = inputs
        self.timings: dict[str, float] = {}
        self.observer: Callable[[str, float, DataProto | None], None] | None = None

    def run(self, batch: DataProto | Mapping[str, Any] | None = None) -> Any:
        """One pass. Returns the batch as the last operator left it, or HOLD when an operator kept it.

        batch: a DataProto or a mapping of columns, which stays as it is; none when the first operator is a source.
        `meta_info["metrics"]` and `["timing"]` of the result hold what the operators reported and took. Those of a pass
        that was held end with it: the operator that held reports when it lets go.
        """
        current = self._enter(batch)
        self.timings, reported = {}, {name: {} for name in MERGED_FACTS}
        if current is not None:
            _move_reports(current, reported)
        for op in self.operators:
            given = current.copy() if current is not None else None
            if given is not None:
                _require_columns(given, op.reads, op)
            start = time.perf_counter()
            try:
                result = op.func() if given is None else op.func(given)
            except Exception as error:
                error.add_note(f"raised in operator {op.name!r}")
                raise
            seconds = time.perf_counter() - start
            self.timings[op.name] = seconds
            logger.info("[%s] %.2fs", op.name, seconds)
            if result is not HOLD:
                current = _advance(op, current, given, result, reported)
            if self.observer is not None:
                self.observer(op.name, seconds, current)
            if result is HOLD:
                return HOLD
        current.meta_info |= {"metrics": reported["metrics"], "timing": reported["timing"] | self.timings}
        return current

    def _enter(self, batch: DataProto | Mapping[str, Any] | None) -> DataProto | None:
        """The batch that was given to `run`, checked; None where the first operator makes it."""
        first = self.operators[0]
        if batch is None and not first.is_source:
            raise ValueError(f"the flow's first operator {first.name!r} needs a batch: call run(batch)")
        if batch is None:
            return None
        if not first.takes_batch:
            raise ValueError(f"the flow's first operator {first.name!r} makes the batch itself: call run()")
        current = _as_batch(batch).copy()
        for op in self.operators:
            _require_columns(current, [c for c in op.reads if c in self.inputs], op)
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


def _as_batch(value: Any) -> DataProto:
    if isinstance(value, DataProto):
        return value
    if isinstance(value, Mapping):
        return DataProto.from_single_dict(value)
    raise DataProtoValidationError(
        f"expected a DataProto, a mapping of columns, None or HOLD, found {type(value).__name__}"
    )


def _require_columns(batch: DataProto, names: Iterable[str], op: Operator) -> None:
    for name in names:
        if name not in batch:
            raise DataProtoValidationError(
                f"operator {op.name!r} reads {name!r}, which is not in the batch: {did_you_mean(name, batch.columns)}"
            )


def _move_reports(batch: DataProto, reported: dict[str, dict[str, Any]]) -> None:
    """Move the metrics (and the finer timings) that stand on a batch to those of the run."""
    for name in MERGED_FACTS:
        facts = batch.meta_info.pop(name, {})
        if not isinstance(facts, Mapping):
            raise DataProtoValidationError(
                f"meta_info[{name!r}]: expected a dict, found {type(facts).__name__}: {facts!r}"
            )
        reported[name] |= facts


def _advance(
    op: Operator,
    current: DataProto | None,
    given: DataProto | None,
    result: Any,
    reported: dict[str, dict[str, Any]],
) -> DataProto:
    """The batch after `op`, which was given a copy of `current`, returned `result`; its reports go to `reported`."""
    try:
        if result is None:
            after = _unchanged(op, current, given)
        elif op.writes and current is not None:
            current.meta_info = given.meta_info
            after = _added(op, current, _as_batch(result))
        else:
            after = _instead(op, given, _as_batch(result))
        columns.check_contents(after)
        _move_reports(after, reported)
    except DataProtoValidationError as error:
        raise DataProtoValidationError(f"operator {op.name!r}: {error}{describe_source(op.func)}") from None
    return after


def _unchanged(op: Operator, current: DataProto | None, given: DataProto | None) -> DataProto:
    """The operator returned None: the batch goes on with the columns it had."""
    if op.writes or current is None:
        expected = f"the columns {list(op.writes)}" if op.writes else "a batch"
        raise DataProtoValidationError(f"expected {expected}, found None")
    before, now = current.tensors | current.non_tensor_batch, given.tensors | given.non_tensor_batch
    if touched := [c for c in {**before, **now} if before.get(c) is not now.get(c)]:
        raise DataProtoValidationError(
            f"it changed the columns {touched} of the batch but returned None: return the batch, or the columns "
            "under declared `writes`"
        )
    return given


def _instead(op: Operator, given: DataProto | None, result: DataProto) -> DataProto:
    """The batch from here on: what a source made, or what an operator without `writes` returned."""
    _require_written(op, result)
    if given is not None and given.columns and not result.columns:
        raise DataProtoValidationError(
            "it returned a batch without columns, which would be the batch from here on; return None to keep the one "
            "there is (metrics go into batch.meta_info['metrics'])"
        )
    facts = given.meta_info if given is not None else {}
    return DataProto(meta_info=facts).union(result)  # which checks the columns too


def _added(op: Operator, current: DataProto, result: DataProto) -> DataProto:
    """The batch with the declared columns of `result`.

    What an operator declares it may write anew (rescaled rewards); a column that it hands back must be the one that was
    there. Columns of its own it may add freely, but not those of the table: the edges of the flow come from `writes`.
    """
    _require_written(op, result)
    if undeclared := [c for c in result.columns if c in columns.COLUMNS and c not in (*op.writes, *current.columns)]:
        raise DataProtoValidationError(
            f"it returned {undeclared}, which it does not declare: add them to its `writes` or leave them out"
        )
    if len(result) != len(current):
        raise DataProtoValidationError(f"it adds {list(op.writes)} to {len(current)} rows, found {len(result)} rows")
    rewritten = [c for c in op.writes if c in current]
    return (current.drop(rewritten) if rewritten else current).union(result)


def _require_written(op: Operator, result: DataProto) -> None:
    if missing := [c for c in op.writes if c not in result]:
        raise DataProtoValidationError(
            f"it declares that it writes {missing[0]!r}, but returned {list(result.columns)}"
        )
