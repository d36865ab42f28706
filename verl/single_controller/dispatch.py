"""How one call on a worker group becomes one call per rank, and how the results become one value again.

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto) -> DataProto: ...

A dispatch mode is a pair of pure functions over (arguments, Layout). Rows are split over the data-parallel coordinate
only and replicated over the others; one rank of each data-parallel group answers (last pipeline stage, first
tensor/sequence-parallel rank). This is the transfer protocol of HybridFlow (Sheng et al., 2024, arXiv 2409.19256,
section 4.1) for any mesh.

| mode               | each rank gets                                  | the caller gets                            |
|--------------------|-------------------------------------------------|--------------------------------------------|
| RANK_ZERO          | the same arguments                              | the result of rank 0                       |
| ONE_TO_ALL         | the same arguments                              | a list, one result a rank                  |
| ALL_TO_ALL         | its entry of every argument (lists, one a rank) | a list, one result a rank                  |
| DP_COMPUTE         | the entry of its dp group                       | a list, one result a dp group              |
| DP_COMPUTE_PROTO   | its rows of every DataProto, the rest as it is  | the DataProtos of the dp groups, as one    |
| DP_COMPUTE_METRIC  | the same, but the rows must divide evenly       | the metrics of the dp groups, merged       |
| ND_COMPUTE         | as DP_COMPUTE_PROTO, over the mesh named `mesh` | the DataProtos of that mesh's dp groups    |

DP_COMPUTE_PROTO fills up with copies of rows when the data-parallel size does not divide the batch, and takes their
results away again. A method that sums over rows (an update) belongs in DP_COMPUTE_METRIC, which never does that.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from numbers import Real
from types import FunctionType
from typing import Any

from verl.protocol import DataProto
from verl.registry import Registry

# ---- where the ranks sit ------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Coordinates:
    """Where one rank sits in a mesh. dp: which part of the rows it works on. tp: its place among the ranks that share
    these rows inside a stage (tensor or sequence parallel). pp: its pipeline stage."""

    dp: int = 0
    tp: int = 0
    pp: int = 0


@dataclass(frozen=True)
class Layout:
    """One mesh: the coordinates of every rank, in rank order. Each point of the mesh holds exactly one rank."""

    coordinates: tuple[Coordinates, ...]

    def __post_init__(self) -> None:
        dp, tp, pp = self.shape
        every_point = [Coordinates(d, t, p) for d in range(dp) for t in range(tp) for p in range(pp)]
        if not self.coordinates or sorted(self.coordinates) != every_point:
            found = ", ".join(f"rank {i}: dp {c.dp} tp {c.tp} pp {c.pp}" for i, c in enumerate(self.coordinates))
            raise ValueError(f"a layout needs exactly one rank at every point of its mesh, found {found or 'no ranks'}")

    @classmethod
    def grid(cls, dp: int = 1, tp: int = 1, pp: int = 1) -> "Layout":
        """The usual order of ranks: tp neighbours are consecutive, then dp, and pp is the slowest."""
        return cls(tuple(Coordinates(d, t, p) for p in range(pp) for d in range(dp) for t in range(tp)))

    @property
    def world_size(self) -> int:
        return len(self.coordinates)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """The sizes of the mesh: (dp, tp, pp)."""
        return tuple(1 + max((c[i] for c in map(dataclasses.astuple, self.coordinates)), default=-1) for i in range(3))

    @property
    def dp_size(self) -> int:
        return self.shape[0]

    @cached_property
    def collect_ranks(self) -> tuple[int, ...]:
        """The rank that answers for each dp group, in dp order: last pp, first tp."""
        rank_at = {c: rank for rank, c in enumerate(self.coordinates)}
        return tuple(rank_at[Coordinates(d, 0, self.shape[2] - 1)] for d in range(self.dp_size))


# ---- what one rank is asked to do ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The arguments of one rank.

    padding: rows at the end of its DataProtos that only fill up; `finish` takes their results away again.
    collect: whether the caller looks at this rank's result; one that it does not look at is not sent.
    Ranks with the same rows share the same `args` and `kwargs` objects, so that an executor can send them once.
    """

    args: tuple = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    padding: int = 0
    collect: bool = True

    def finish(self, result: Any) -> Any:
        """The result as it travels to the caller: without the padded rows; None when nobody collects it."""
        if not self.collect:
            return None
        if not self.padding or not isinstance(result, DataProto):
            return result
        rows = next(len(v) for v in (*self.args, *self.kwargs.values()) if _has_rows(v))
        if len(result) != rows:
            raise ValueError(
                f"got {rows} rows, {self.padding} of them padding, and returned {len(result)}: which of these belong "
                f"to the padding is unknown. Return one row for each row, or call with a batch that the data-parallel "
                f"size divides"
            )
        return result.unpad(self.padding)


DispatchFn = Callable[[Layout, tuple, dict], list[Call | None]]
CollectFn = Callable[[Layout, list], Any]


@dataclass(frozen=True)
class DispatchMode:
    """dispatch(layout, args, kwargs) -> one Call per rank (None: this rank stays out);
    collect(layout, results in rank order) -> what the caller gets."""

    dispatch: DispatchFn
    collect: CollectFn


DISPATCH_MODES: Registry[DispatchMode] = Registry("dispatch mode")


def register_dispatch_mode(name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Add a dispatch mode of one's own; `@register(dispatch_mode=name)` then uses it.

    dispatch_fn(layout, args, kwargs) returns a list with one Call per rank, or None for a rank that is not called.
    collect_fn(layout, results) gets the results in rank order (None for a rank not called or not collected).
    """
    if name in DISPATCH_MODES:
        raise ValueError(f"dispatch mode {name!r} is registered already; choose another name")
    DISPATCH_MODES.register(str(name), DispatchMode(dispatch_fn, collect_fn))


# ---- rows over data-parallel ranks --------------------------------------------------------------------------------


def _has_rows(value: Any) -> bool:
    """Whether a value is split over ranks: a DataProto with columns. One of `meta_info` alone goes to every rank."""
    return isinstance(value, DataProto) and bool(value.columns)


def _count_rows(args: tuple, kwargs: dict) -> int | None:
    """The number of rows of the DataProto arguments, which must agree; None when there is none."""
    rows = {f"argument {i}": len(v) for i, v in enumerate(args) if _has_rows(v)}
    rows |= {name: len(v) for name, v in kwargs.items() if _has_rows(v)}
    if len(set(rows.values())) > 1:
        raise ValueError(f"the batches of one call need the same number of rows, found {rows}")
    if 0 in rows.values():
        raise ValueError("got a batch without rows: there is nothing to compute; check what filtered them all out")
    return next(iter(rows.values()), None)


def _split(value: Any, dp_size: int) -> list:
    """The pieces of one argument: equal shares of the rows, filled up at the end; any other value as it is."""
    return value.pad_to_divisor(dp_size)[0].chunk(dp_size) if _has_rows(value) else [value] * dp_size


def _spread(layout: Layout, groups: Sequence[Call]) -> list[Call]:
    """One call per rank from one call per dp group; only the collecting rank of each group answers."""
    answering = set(layout.collect_ranks)
    calls = (groups[at.dp] for at in layout.coordinates)
    return [c if rank in answering else dataclasses.replace(c, collect=False) for rank, c in enumerate(calls)]


def _dispatch_rows(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    rows, dp = _count_rows(args, kwargs), layout.dp_size
    share = -(-rows // dp) if rows is not None else 0
    pieces = [_split(v, dp) for v in args]
    named = {k: _split(v, dp) for k, v in kwargs.items()}
    groups = []
    for d in range(dp):
        own = min(max(rows - d * share, 0), share) if rows is not None else 0
        groups.append(Call(tuple(p[d] for p in pieces), {k: p[d] for k, p in named.items()}, padding=share - own))
    return _spread(layout, groups)


def _dispatch_even_rows(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    rows = _count_rows(args, kwargs)
    if rows is not None and rows % layout.dp_size:
        raise ValueError(
            f"got {rows} rows for {layout.dp_size} data-parallel ranks: expected a multiple of {layout.dp_size}, since "
            f"a row added to fill up would count twice in the sums and gradients of this method"
        )
    return _dispatch_rows(layout, args, kwargs)


def _answers(layout: Layout, results: list) -> list:
    """One result per dp group, in dp order."""
    return [results[rank] for rank in layout.collect_ranks]


def _collect_rows(layout: Layout, results: list) -> DataProto | None:
    """The rows of the dp groups one after another; metrics in `meta_info` are merged. None when all returned None."""
    answers = _answers(layout, results)
    if all(a is None for a in answers):
        return None
    for rank, answer in zip(layout.collect_ranks, answers):
        if not isinstance(answer, DataProto):
            raise ValueError(f"expected a DataProto from every rank, found {type(answer).__name__} from rank {rank}")
    pieces = [a for a in answers if len(a)] or answers
    whole = DataProto.concat(pieces) if len(pieces) > 1 else pieces[0].copy()  # concat copies the memory
    if "metrics" in whole.meta_info:
        whole.meta_info["metrics"] = merge_metrics([a.meta_info.get("metrics", {}) for a in answers])
    if "timing" in whole.meta_info:
        whole.meta_info["timing"] = _slowest([a.meta_info.get("timing", {}) for a in answers])
    return whole


def _collect_metrics(layout: Layout, results: list) -> dict[str, float]:
    answers = _answers(layout, results)
    for rank, answer in zip(layout.collect_ranks, answers):
        if not isinstance(answer, dict):
            raise ValueError(
                f"expected a dict of metrics from every rank, found {type(answer).__name__} from rank {rank}"
            )
    return merge_metrics(answers)


def merge_metrics(pieces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One dict from the metrics of every data-parallel group.

    A pair (sum, count) gives the mean over all groups, whatever their sizes: total sum / total count; it is left out
    when nothing was counted. A plain number (grad_norm, lr) must be the same everywhere, since a mean of means would
    be wrong; raises ValueError that names the metric when it is not.
    """
    merged = {}
    for name in dict.fromkeys(name for piece in pieces for name in piece):
        found = [piece[name] for piece in pieces if name in piece]
        if all(isinstance(v, tuple) and len(v) == 2 for v in found):
            total, count = math.fsum(v[0] for v in found), math.fsum(v[1] for v in found)
            if count:
                merged[name] = total / count
        elif all(isinstance(v, Real) for v in found):
            if not all(_agree(v, found[0]) for v in found):
                raise ValueError(
                    f"metric {name!r} differs over the data-parallel ranks: {found}. Return a pair (sum, count) for a "
                    f"mean over rows or tokens; a plain number must be the same on every rank"
                )
            merged[name] = float(found[0])
        else:
            raise ValueError(f"metric {name!r}: expected numbers or pairs (sum, count), found {found}")
    return merged


def _slowest(pieces: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by name: those of the slowest rank, for which the others wait."""
    names = dict.fromkeys(name for piece in pieces for name in piece)
    return {name: max(piece[name] for piece in pieces if name in piece) for name in names}


def _agree(a: Real, b: Real) -> bool:
    return math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))


# ---- the other modes ----------------------------------------------------------------------------------------------


def _dispatch_same(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    return [Call(args, kwargs)] * layout.world_size


def _dispatch_same_collect_zero(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    return [Call(args, kwargs, collect=rank == 0) for rank in range(layout.world_size)]


def _entries(n: int, what: str, args: tuple, kwargs: dict) -> list[Call]:
    """One call from the i-th entry of every argument."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, list | tuple) or len(value) != n:
            size = f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple) else "")
            raise ValueError(
                f"argument {name}: expected a list with one entry for each of the {n} {what}, found {size}"
            )
    return [Call(tuple(v[i] for v in args), {k: v[i] for k, v in kwargs.items()}) for i in range(n)]


def _dispatch_entry_per_rank(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    return _entries(layout.world_size, "ranks", args, kwargs)


def _dispatch_entry_per_dp(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    return _spread(layout, _entries(layout.dp_size, "data-parallel groups", args, kwargs))


def _collect_zero(layout: Layout, results: list) -> Any:
    return results[0]


def _collect_all(layout: Layout, results: list) -> list:
    return results


class Dispatch(StrEnum):
    """The dispatch modes that are always there; the module's docstring has the table."""

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    ND_COMPUTE = "ND_COMPUTE"


class Execute(StrEnum):
    """Which ranks run the method."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


register_dispatch_mode(Dispatch.RANK_ZERO, _dispatch_same_collect_zero, _collect_zero)
register_dispatch_mode(Dispatch.ONE_TO_ALL, _dispatch_same, _collect_all)
register_dispatch_mode(Dispatch.ALL_TO_ALL, _dispatch_entry_per_rank, _collect_all)
register_dispatch_mode(Dispatch.DP_COMPUTE, _dispatch_entry_per_dp, _answers)
register_dispatch_mode(Dispatch.DP_COMPUTE_PROTO, _dispatch_rows, _collect_rows)
register_dispatch_mode(Dispatch.DP_COMPUTE_METRIC, _dispatch_even_rows, _collect_metrics)
register_dispatch_mode(Dispatch.ND_COMPUTE, _dispatch_rows, _collect_rows)


# ---- marking a worker's methods -----------------------------------------------------------------------------------

_MARK = "__registered__"


@dataclass(frozen=True)
class Registered:
    """What `@register` says about a method. mesh: which of the worker's meshes its layout is (None: the main one)."""

    dispatch_mode: str
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    mesh: str | None = None

    def dispatch(self, layout: Layout, args: tuple, kwargs: dict) -> list[Call | None]:
        """One call per rank; None for a rank that does not run."""
        calls = DISPATCH_MODES[self.dispatch_mode].dispatch(layout, args, kwargs)
        if len(calls) != layout.world_size:
            raise ValueError(
                f"dispatch mode {self.dispatch_mode!r} gave {len(calls)} calls for {layout.world_size} ranks"
            )
        return [c if rank == 0 or self.execute_mode is Execute.ALL else None for rank, c in enumerate(calls)]

    def collect(self, layout: Layout, results: list) -> Any:
        """The caller's value from the results in rank order."""
        if self.execute_mode is Execute.RANK_ZERO:
            return results[0]
        return DISPATCH_MODES[self.dispatch_mode].collect(layout, results)


def register(
    dispatch_mode: Dispatch | str,
    execute_mode: Execute | str = Execute.ALL,
    blocking: bool = True,
    mesh: str | None = None,
) -> Callable[[FunctionType], FunctionType]:
    """Mark a worker's method as callable through its worker group.

    dispatch_mode: a Dispatch, or the name given to `register_dispatch_mode`.
    execute_mode: ALL, or RANK_ZERO: only rank 0 runs and its result is returned as it is.
    blocking: False makes the group's method return a Future at once.
    mesh: the mesh whose layout is used, for a worker that sits in several (`Worker.layout(mesh)`).
    A method that overrides a marked one keeps its mark.
    """
    mode, execute = str(dispatch_mode), Execute(execute_mode)
    DISPATCH_MODES[mode]  # an unknown name is an error here, where the worker is written
    if execute is Execute.RANK_ZERO and mode not in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL):
        raise ValueError(
            f"execute_mode RANK_ZERO goes with dispatch_mode RANK_ZERO or ONE_TO_ALL, found {mode}: the arguments of "
            f"the other ranks would be lost"
        )
    if mode == Dispatch.ND_COMPUTE and mesh is None:
        raise ValueError("dispatch_mode ND_COMPUTE needs mesh='...': the name that Worker.layout(mesh) is asked for")

    def mark(method: FunctionType) -> FunctionType:
        setattr(method, _MARK, Registered(mode, execute, blocking, mesh))
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Registered]:
    """The marked methods of a class by name, inherited ones and unmarked overrides of marked ones included."""
    found: dict[str, Registered] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and _MARK in vars(value):
                found[name] = vars(value)[_MARK]
    return found
