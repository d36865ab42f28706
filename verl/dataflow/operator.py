"""Operator: a named function of the batch, the columns it reads and writes, and the operators it depends on."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

from verl.columns import callable_name, describe_source

CONTROLLER = "controller"
"""`Operator.on` of a function that runs in the process of the flow itself."""


class _Hold:
    """The type of HOLD."""

    def __repr__(self) -> str:
        return "HOLD"


_running: ContextVar[str | None] = ContextVar("operator", default=None)


@contextmanager
def running(name: str) -> Iterator[None]:
    """Record in this context which operator runs: the timeouts of its calls depend on its earlier durations."""
    token = _running.set(name)
    try:
        yield
    finally:
        _running.reset(token)


def running_operator() -> str | None:
    """The name of the operator that runs in this thread; None outside of operators."""
    return _running.get()


HOLD = _Hold()
"""Returned by an operator that keeps the batch: the run ends here and the next one starts from the first operator."""


class Stateful(ABC):
    """An object with state that checkpoints carry.

    The operator's function is the object itself (with a `__call__`) or one of its methods.
    """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Operator:
    """A named step of a flow.

        def mask_truncated(batch):
            mask = batch.batch["response_mask"]
            complete = mask.sum(1, keepdim=True) < mask.shape[1]
            return {"loss_mask": mask * complete}

        Operator("overlong", mask_truncated, reads=("response_mask",), writes=("loss_mask",))

    Args:
        name: unique in the flow; log lines, timings, errors and edits of the flow use it.
        func: takes the batch (or nothing, for a source). The docstring of `verl.dataflow` lists what it may return.
        reads: the columns it needs. A single name may be given as a plain string.
        writes: the columns it adds.
        on: where it runs: the name of a role, or CONTROLLER. Requires that `reads` and `writes` are complete. Operators
            that do not depend on each other may then run at the same time in different processes
            (`Pipeline.processes_of`), and the operator may only add its `writes`. Without `on`, the operator runs
            alone: everything before it has ended, and nothing after it has started.

    Raises:
        ValueError: if `func` cannot be called with the batch alone, or a name is not a string.
    """

    name: str
    func: Callable[..., Any]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    on: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"operator name: expected a non-empty string, found {self.name!r}")
        if not callable(self.func):
            raise ValueError(f"operator {self.name!r}: expected a function, found {type(self.func).__name__}")
        if not (self.accepts_batch or self.is_source):
            raise ValueError(
                f"operator {self.name!r}: expected a function of the batch alone, found "
                f"{callable_name(self.func)}{inspect.signature(self.func)}; bind the other arguments with "
                f"functools.partial{describe_source(self.func)}"
            )
        object.__setattr__(self, "reads", self._column_names("reads", self.reads))
        object.__setattr__(self, "writes", self._column_names("writes", self.writes))

    def _column_names(self, field: str, names: Any) -> tuple[str, ...]:
        names = (names,) if isinstance(names, str) else tuple(names)
        if wrong := [n for n in names if not isinstance(n, str)]:
            raise ValueError(f"operator {self.name!r}: {field}: expected column names, found {wrong[0]!r}")
        return names

    @functools.cached_property
    def accepts_batch(self) -> bool:
        """Whether the function can be called with the batch alone."""
        return _can_be_called(self.func, None)

    @functools.cached_property
    def is_source(self) -> bool:
        """Whether the function can be called without arguments, that is, creates the batch."""
        return _can_be_called(self.func)

    @functools.cached_property
    def stateful(self) -> Stateful | None:
        """The `Stateful` object behind the function; None if there is none."""
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
    """Return an operator unchanged; wrap a plain function in an operator of the same name."""
    if isinstance(step, Operator):
        return step
    if not callable(step):
        raise ValueError(f"flow: expected an Operator or a function, found {type(step).__name__}: {step!r}")
    return Operator(callable_name(step), step)


def edges(operators: Iterable[Operator]) -> list[tuple[str, str, str]]:
    """Return (writer, reader, column) for every column read: the writer is the last one before the reader."""
    writer: dict[str, str] = {}
    result = []
    for op in operators:
        result += [(writer[c], op.name, c) for c in op.reads if c in writer]
        writer |= {c: op.name for c in op.writes}
    return result


@dataclass(frozen=True)
class Dependencies:
    """Dependencies of one operator, and the columns that it must not see."""

    ancestors: frozenset[int]  # positions of all operators that it depends on, directly or not
    # columns written by concurrent operators. An operator sees the columns of its ancestors and those that it reads, so
    # the order of concurrent operators changes no number.
    hidden: frozenset[str]


def depends(later: Operator, earlier: Operator) -> bool:
    """Whether `later` must wait for `earlier`, regardless of processes.

    True if it reads what `earlier` writes, or writes what `earlier` reads or writes. An operator without `on` is a
    barrier: it depends on all operators before it, and all operators after it depend on it.
    """
    if later.on is None or earlier.on is None:
        return True
    written, touched = set(earlier.writes), {*earlier.reads, *earlier.writes}
    return bool(written & set(later.reads) or touched & set(later.writes))


def dependencies(operators: Sequence[Operator]) -> list[Dependencies]:
    """Return the dependencies of each operator of a list."""
    ancestors: list[frozenset[int]] = []
    for i, op in enumerate(operators):
        direct = [j for j in range(i) if depends(op, operators[j])]
        ancestors.append(frozenset(direct).union(*(ancestors[j] for j in direct)))
    result = []
    for i, op in enumerate(operators):
        concurrent = [o for j, o in enumerate(operators) if j != i and j not in ancestors[i] and i not in ancestors[j]]
        written = {column for other in concurrent for column in other.writes}
        result.append(Dependencies(ancestors[i], frozenset(written - set(op.reads))))
    return result
