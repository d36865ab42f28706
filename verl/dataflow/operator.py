"""Operator: a named function of the batch, with the columns that it reads and writes, and where its work is done."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from verl.columns import callable_name, describe_source

CONTROLLER = "controller"
"""`Operator.on` of a function that works in the process of the flow itself."""


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

    func: takes the batch (or nothing, for a source) and returns as the docstring of `verl.dataflow` says.
    reads / writes: the columns it needs and adds; one name may stand as a plain string.
    on: where its work is done, the name of a role or CONTROLLER. It is a promise: `reads` and `writes` are complete, so
    operators that do not depend on one another may run at the same time in different places (`Pipeline.place_of`).
    Such an operator adds its `writes` and nothing else. Without `on`, everything before it ends first, and nothing
    after it has begun.
    Raises ValueError when `func` cannot be called so, before anything runs.
    """

    name: str
    func: Callable[..., Any]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    on: str | None = None

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


def edges(operators: Iterable[Operator]) -> list[tuple[str, str, str]]:
    """(writer, reader, column) of every column that travels: B depends on A when B reads what A wrote last."""
    writer: dict[str, str] = {}
    found = []
    for op in operators:
        found += [(writer[c], op.name, c) for c in op.reads if c in writer]
        writer |= {c: op.name for c in op.writes}
    return found
