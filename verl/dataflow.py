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

Execution is eager and in list order: the stack trace of a failing function is fit -> run -> that function.
"""

import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl import columns
from verl.columns import DataProtoValidationError, describe_source
from verl.protocol import DataProto
from verl.registry import did_you_mean

logger = logging.getLogger("verl.dataflow")


class _Hold:
    """The type of HOLD."""

    def __repr__(self) -> str:
        return "HOLD"


HOLD = _Hold()


class Stateful(ABC):
    """An operator function that keeps something between steps; checkpoints carry its state."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Operator:
    """A named step of a flow.

    func: takes the batch (or nothing, for a source) and returns as the module's docstring says.
    reads / writes: the columns it needs and adds; what `compile` checks and derives the edges from.
    """

    name: str
    func: Callable[..., Any]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.func):
            raise ValueError(f"operator {self.name!r}: expected a function, found {type(self.func).__name__}")
        for what in ("reads", "writes"):
            value = getattr(self, what)
            object.__setattr__(self, what, (value,) if isinstance(value, str) else tuple(value))

    @property
    def is_source(self) -> bool:
        """Whether the function takes no batch but makes one."""
        return not inspect.signature(self.func).parameters


def as_operator(step: "Operator | Callable") -> Operator:
    """An operator as it is; a plain function becomes the operator of its own name."""
    if isinstance(step, Operator):
        return step
    if not callable(step):
        raise ValueError(f"a flow is made of Operators and functions, found {type(step).__name__}: {step!r}")
    name = step.__name__ if inspect.isroutine(step) else type(step).__name__
    return Operator(name, step)


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
        at = self._index(name)
        taken = self._operators.pop(at)
        try:
            return self._insert(at, operator)
        except ValueError:
            self._operators.insert(at, taken)
            raise

    def remove(self, name: str) -> "DataFlow":
        """Take the operator called `name` out."""
        del self._operators[self._index(name)]
        return self

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"the flow has no operator {name!r}: {did_you_mean(name, self.names)}")
        return self.names.index(name)

    def _insert(self, at: int, operator: "Operator | Callable") -> "DataFlow":
        operator = as_operator(operator)
        if operator.name in self.names:
            raise ValueError(f"the flow has an operator {operator.name!r} already; operators are edited by name")
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
            if op.is_source:
                raise ValueError(
                    f"operator {op.name!r} takes no batch: only the first operator of a flow may be a source"
                )
        first = self._operators[0]
        known = set(inputs) if inputs is not None else set(first.writes) if first.is_source and first.writes else None
        present, needed = set(known or ()), []
        for i, op in enumerate(self._operators):
            for name in op.reads:
                if name in present:
                    continue
                later = [o.name for o in self._operators[i + 1 :] if name in o.writes]
                if later:
                    raise ValueError(f"operator {op.name!r} reads {name!r}, which {later[0]!r} writes only after it")
                if known is not None:
                    raise ValueError(
                        f"operator {op.name!r} reads {name!r}, which nobody writes: {did_you_mean(name, present)}"
                    )
                needed.append(name)
            present.update(op.writes)
        return Pipeline(tuple(self._operators), () if first.is_source else tuple(dict.fromkeys(needed)))


def edges(operators: Iterable[Operator]) -> list[tuple[str, str, str]]:
    """(writer, reader, column) of every column that travels: B depends on A when B reads what A wrote last."""
    writer: dict[str, str] = {}
    found = []
    for op in operators:
        found += [(writer[c], op.name, c) for c in op.reads if c in writer]
        writer |= {c: op.name for c in op.writes}
    return found


class Pipeline:
    """A checked flow. `run` sends one batch through it; `timings` holds the seconds of each operator of the last run.

    observer: called with (operator name, seconds, batch) after each operator.
    """

    def __init__(self, operators: tuple[Operator, ...], inputs: tuple[str, ...] = ()):
        self.operators = operators
        self.inputs = inputs
        self.timings: dict[str, float] = {}
        self.observer: Callable[[str, float, DataProto], None] | None = None

    def run(self, batch: DataProto | Mapping[str, Any] | None = None) -> Any:
        """One pass. Returns the batch as the last operator left it, or HOLD when an operator kept it.

        batch: a DataProto or a mapping of columns; none when the first operator is a source.
        `batch.meta_info["metrics"]` and `["timing"]` hold what the operators reported and took.
        """
        first = self.operators[0]
        if (batch is None) != first.is_source:
            problem = "makes the batch itself: call run()" if first.is_source else "needs a batch: call run(batch)"
            raise ValueError(f"the flow's first operator {first.name!r} {problem}")
        current = _as_batch(batch, first.func) if batch is not None else None
        for name in self.inputs:
            if name not in current:
                reader = next(op.name for op in self.operators if name in op.reads)
                raise DataProtoValidationError(
                    f"operator {reader!r} reads {name!r}, which is neither in the batch nor written before: "
                    f"{did_you_mean(name, current.columns)}"
                )
        self.timings, metrics = {}, {}
        for op in self.operators:
            start = time.perf_counter()
            result = op.func() if op.is_source else op.func(current)
            seconds = time.perf_counter() - start
            self.timings[op.name] = seconds
            logger.info("[%s] %.2fs", op.name, seconds)
            if result is HOLD:
                return HOLD
            current = _advance(op, current, result)
            metrics |= current.meta_info.pop("metrics", {})
            if self.observer is not None:
                self.observer(op.name, seconds, current)
        current.meta_info |= {"metrics": metrics, "timing": dict(self.timings)}
        return current

    def state_dict(self) -> dict[str, Any]:
        """The state of every stateful operator, by name."""
        return {op.name: op.func.state_dict() for op in self.operators if isinstance(op.func, Stateful)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave. Raises ValueError when this flow has other stateful operators."""
        stateful = {op.name: op.func for op in self.operators if isinstance(op.func, Stateful)}
        if set(stateful) != set(state):
            raise ValueError(
                f"the saved state is of the operators {sorted(state)}, this flow has {sorted(stateful)}: "
                "resume with the flow that was saved"
            )
        for name, func in stateful.items():
            func.load_state_dict(state[name])


def _as_batch(value: Any, source: Callable) -> DataProto:
    if isinstance(value, DataProto):
        return value
    if isinstance(value, Mapping):
        return DataProto.from_single_dict(value)
    raise DataProtoValidationError(
        f"expected a DataProto or a mapping of columns, found {type(value).__name__}{describe_source(source)}"
    )


def _advance(op: Operator, current: DataProto | None, result: Any) -> DataProto:
    """The batch after `op` returned `result`."""
    if result is None:
        if op.writes or current is None:
            what = f"the columns {list(op.writes)}" if op.writes else "a batch"
            raise DataProtoValidationError(
                f"operator {op.name!r}: expected {what}, found None{describe_source(op.func)}"
            )
        return current
    result = _as_batch(result, op.func)
    if not op.writes or current is None:
        after = result
        if current is not None and after is not current:
            after.meta_info = current.meta_info | after.meta_info
    else:
        after = _add(op, current, result)
    missing = [c for c in op.writes if c not in after]
    if missing:
        raise DataProtoValidationError(
            f"operator {op.name!r} declares that it writes {missing[0]!r}, but did not: "
            f"it wrote {list(result.columns)}{describe_source(op.func)}"
        )
    columns.check(after, op.func)
    return after


def _add(op: Operator, current: DataProto, result: DataProto) -> DataProto:
    if len(result) != len(current):
        raise DataProtoValidationError(
            f"operator {op.name!r} adds {list(op.writes)} to {len(current)} rows, found {len(result)} rows"
            f"{describe_source(op.func)}"
        )
    # what an operator declares to write it may write anew (rescaled rewards); anything else must be new or equal
    rewritten = [c for c in op.writes if c in current and c in result]
    try:
        return current.drop(rewritten).union(result)
    except DataProtoValidationError as error:
        raise DataProtoValidationError(f"operator {op.name!r}: {error}{describe_source(op.func)}") from None
