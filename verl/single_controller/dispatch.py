"""Dispatch modes: turn a call on a worker group into one call per rank, and combine the results.

    class Actor(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_log_prob(self, batch: DataProto) -> DataProto: ...

    group = LocalWorkerGroup(WorkerSpec(Actor), n_workers=4)
    log_probs = group.compute_log_prob(batch)   # each rank gets a quarter of the rows

A dispatch mode is a pair of pure functions over (arguments, Layout). Rows are split over the data-parallel dimension
and replicated over the others; one rank of each data-parallel group returns the result: the last pipeline stage, first
tensor- or sequence-parallel rank. This is the transfer protocol of HybridFlow (Sheng et al., 2024, arXiv 2409.19256,
section 4.1) for any mesh.

| mode              | each rank gets                                  | the caller gets                               |
|-------------------|-------------------------------------------------|-----------------------------------------------|
| RANK_ZERO         | the same arguments                              | the result of rank 0                          |
| ONE_TO_ALL        | the same arguments                              | a list, one result per rank                   |
| ONE_TO_GROUPS     | the same arguments                              | a list, one result per DP group               |
| ALL_TO_ALL        | its entry of every argument (a list)            | a list, one result per rank                   |
| DP_COMPUTE        | the entry of its DP group                       | a list, one result per DP group               |
| DP_COMPUTE_PROTO  | its rows of every DataProto, the rest unchanged | the DataProtos of the DP groups, concatenated |
| DP_COMPUTE_METRIC | the same; the rows must divide evenly           | the metrics of the DP groups, merged          |

If the data-parallel size does not divide the batch, DP_COMPUTE_PROTO pads with copies of rows and drops their results.
A method that sums over rows (an update) needs DP_COMPUTE_METRIC, which never pads.
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

from torch.profiler import record_function

from verl.compat.hook import published_names
from verl.protocol import DataProto
from verl.registry import Registry

# ---- layouts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Coordinates:
    """The position of one rank in a mesh."""

    dp: int = 0  # data-parallel rank: which rows it processes
    tp: int = 0  # rank among those that share these rows within a pipeline stage (tensor or sequence parallel)
    pp: int = 0  # pipeline stage


@dataclass(frozen=True)
class Layout:
    """The coordinates of every rank in one mesh, in rank order.

    Raises:
        ValueError: A point of the mesh has no rank, or more than one.
    """

    coordinates: tuple[Coordinates, ...]

    def __post_init__(self) -> None:
        dp, tp, pp = self.shape
        points = [Coordinates(d, t, p) for d in range(dp) for t in range(tp) for p in range(pp)]
        if not self.coordinates or sorted(self.coordinates) != points:
            listed = ", ".join(f"rank {i}: dp {c.dp} tp {c.tp} pp {c.pp}" for i, c in enumerate(self.coordinates))
            raise ValueError(f"expected exactly one rank at every point of the mesh, found {listed or 'no ranks'}")

    @classmethod
    def grid(cls, dp: int = 1, tp: int = 1, pp: int = 1) -> "Layout":
        """The usual order of ranks: tp varies fastest, then dp, then pp."""
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
        """The rank that returns the result of each DP group, in dp order: last pp, first tp."""
        ranks = {c: rank for rank, c in enumerate(self.coordinates)}
        return tuple(ranks[Coordinates(d, 0, self.shape[2] - 1)] for d in range(self.dp_size))


# ---- the call of one rank -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The arguments of one rank.

    Ranks with the same rows share the same `args` and `kwargs` objects, so that an executor can send them once.
    """

    args: tuple = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    padding: int = 0  # number of padding rows at the end of each DataProto; `finish` drops their results
    collect: bool = True  # whether the result of this rank is used. If not, it is not sent.

    def run(self, workers: Mapping[str, Any], role: str, method: str) -> Any:
        """Call a method of the worker of a role, under its name in traces of torch, and prepare the result."""
        with record_function(f"{role}.{method}"):
            result = getattr(workers[role], method)(*self.args, **self.kwargs)
        return self.finish(result)

    def finish(self, result: Any) -> Any:
        """Prepare a result for the caller: drop padding rows, or return None if the result is not collected."""
        if not self.collect:
            return None
        if not self.padding or not isinstance(result, DataProto):
            return result
        rows = next(len(v) for v in (*self.args, *self.kwargs.values()) if _has_rows(v))
        if len(result) != rows:
            raise ValueError(
                f"got {rows} rows, {self.padding} of them padding, and returned {len(result)}: the results of the "
                f"padding rows cannot be identified. Return one row per row, or call the method with a batch size that "
                f"is a multiple of the data-parallel size"
            )
        return result.unpad(self.padding)


DispatchFn = Callable[[Layout, tuple, dict], list[Call | None]]
CollectFn = Callable[[Layout, list], Any]


@dataclass(frozen=True)
class DispatchMode:
    """A way to call the ranks of a group."""

    dispatch: DispatchFn  # (layout, args, kwargs) -> one Call per rank; None for a rank that does not run
    # (layout, results in rank order) -> the value that the caller gets. The result is None for a rank that did not run
    # or whose result is not collected.
    collect: CollectFn


DISPATCH_MODES: Registry[DispatchMode] = Registry("dispatch mode")


def register_dispatch_mode(name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Add a custom dispatch mode (see `DispatchMode`), used by `@register(dispatch_mode=name)`.

    Raises ValueError if the name is taken.
    """
    if name in DISPATCH_MODES:
        raise ValueError(f"dispatch mode {name!r} is registered already; choose another name")
    DISPATCH_MODES.register(str(name), DispatchMode(dispatch_fn, collect_fn))


# ---- rows over data-parallel ranks --------------------------------------------------------------------------------


def _has_rows(value: Any) -> bool:
    """Whether a value is split over the ranks: a DataProto with columns. One with `meta_info` only is replicated."""
    return isinstance(value, DataProto) and bool(value.columns)


def _count_rows(args: tuple, kwargs: dict) -> int | None:
    """The number of rows of the DataProto arguments, which must be equal; None without such arguments."""
    rows = {f"argument {i}": len(v) for i, v in enumerate(args) if _has_rows(v)}
    rows |= {name: len(v) for name, v in kwargs.items() if _has_rows(v)}
    if len(set(rows.values())) > 1:
        raise ValueError(f"the batches of a call need the same number of rows, found {rows}")
    if 0 in rows.values():
        raise ValueError("expected a batch with at least 1 row, found a batch without rows; check what filtered them")
    return next(iter(rows.values()), None)


def _split(value: Any, dp_size: int) -> list:
    """One value per DP group: equal shares of the rows of a DataProto, padded at the end; else the same value."""
    return value.pad_to_divisor(dp_size)[0].chunk(dp_size) if _has_rows(value) else [value] * dp_size


def _call_per_rank(layout: Layout, groups: Sequence[Call]) -> list[Call]:
    """One call per rank from one call per DP group; only the collect rank of each group returns its result."""
    collected = set(layout.collect_ranks)
    calls = (groups[c.dp] for c in layout.coordinates)
    return [c if rank in collected else dataclasses.replace(c, collect=False) for rank, c in enumerate(calls)]


def _dispatch_rows(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    rows, dp = _count_rows(args, kwargs) or 0, layout.dp_size
    share = -(-rows // dp)
    split_args = [_split(v, dp) for v in args]
    split_kwargs = {k: _split(v, dp) for k, v in kwargs.items()}
    groups = []
    for d in range(dp):
        padding = share - min(max(rows - d * share, 0), share)
        groups.append(Call(tuple(v[d] for v in split_args), {k: v[d] for k, v in split_kwargs.items()}, padding))
    return _call_per_rank(layout, groups)


def _dispatch_even_rows(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    rows = _count_rows(args, kwargs)
    if rows is not None and rows % layout.dp_size:
        raise ValueError(
            f"got {rows} rows for {layout.dp_size} data-parallel ranks: expected a multiple of {layout.dp_size}, since "
            f"a padding row would be counted in the sums and gradients of this method"
        )
    return _dispatch_rows(layout, args, kwargs)


def _collect_groups(layout: Layout, results: list) -> list:
    """One result per DP group, in dp order."""
    return [results[rank] for rank in layout.collect_ranks]


def _check_type(expected: type, type_name: str, layout: Layout, groups: list) -> None:
    for rank, result in zip(layout.collect_ranks, groups):
        if not isinstance(result, expected):
            raise ValueError(f"expected {type_name} from every rank, found {type(result).__name__} from rank {rank}")


def _collect_rows(layout: Layout, results: list) -> DataProto | None:
    """The rows of the DP groups, concatenated, with merged metrics in `meta_info`. None if all groups returned None."""
    groups = _collect_groups(layout, results)
    if all(result is None for result in groups):
        return None
    _check_type(DataProto, "a DataProto", layout, groups)
    chunks = [result for result in groups if len(result)] or groups
    out = DataProto.concat(chunks) if len(chunks) > 1 else chunks[0].copy()  # concat copies the memory
    if "metrics" in out.meta_info:
        metrics = [result.meta_info.get("metrics", {}) for result in groups]
        out.meta_info["metrics"] = merge_metrics(metrics, keep_pairs=True)  # a step may be several calls
    if "timing" in out.meta_info:
        timings = [result.meta_info.get("timing", {}) for result in groups]
        names = dict.fromkeys(name for timing in timings for name in timing)
        # seconds of the slowest group, for which the others wait
        out.meta_info["timing"] = {name: max(t[name] for t in timings if name in t) for name in names}
    return out


def _collect_metrics(layout: Layout, results: list) -> dict[str, float]:
    groups = _collect_groups(layout, results)
    _check_type(dict, "a dict of metrics", layout, groups)
    return merge_metrics(groups)


def merge_metrics(groups: Sequence[Mapping[str, Any]], keep_pairs: bool = False) -> dict[str, Any]:
    """Merge the metrics of the data-parallel groups.

    A pair (sum, count) becomes the mean over all groups, total sum / total count, independent of how the rows were
    split. It is dropped if the total count is 0. A plain number (grad_norm, lr) must be equal in all groups, since a
    mean of means would be wrong.

    Args:
        groups: For each group, metric name -> number or (sum, count).
        keep_pairs: Return (total sum, total count) instead of the mean.

    Raises:
        ValueError: A plain number differs between the groups, or a value is neither a number nor a pair.
    """
    merged = {}
    for name in dict.fromkeys(name for group in groups for name in group):
        values = [group[name] for group in groups if name in group]
        if all(isinstance(v, tuple) and len(v) == 2 for v in values):
            total, count = math.fsum(v[0] for v in values), math.fsum(v[1] for v in values)
            if count:
                merged[name] = (total, count) if keep_pairs else total / count
        elif all(isinstance(v, Real) for v in values):
            first = values[0]
            if not all(math.isclose(v, first, rel_tol=1e-6) or (math.isnan(v) and math.isnan(first)) for v in values):
                raise ValueError(
                    f"metric {name!r} differs between the data-parallel ranks: {values}. Return a pair (sum, count) "
                    f"for a mean over rows or tokens; a plain number must be equal on every rank"
                )
            merged[name] = float(first)
        else:
            raise ValueError(f"metric {name!r}: expected numbers or pairs (sum, count), found {values}")
    return merged


# ---- the other modes ----------------------------------------------------------------------------------------------


def _calls_from_entries(n: int, unit: str, args: tuple, kwargs: dict) -> list[Call]:
    """Call i gets the i-th entry of every argument."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, list | tuple) or len(value) != n:
            size = f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple) else "")
            raise ValueError(
                f"argument {name}: expected a list with one entry for each of the {n} {unit}, found {size}"
            )
    return [Call(tuple(v[i] for v in args), {k: v[i] for k, v in kwargs.items()}) for i in range(n)]


def _dispatch_entry_per_group(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    return _call_per_rank(layout, _calls_from_entries(layout.dp_size, "data-parallel groups", args, kwargs))


class Dispatch(StrEnum):
    """The built-in dispatch modes; see the table in the module docstring."""

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ONE_TO_GROUPS = "ONE_TO_GROUPS"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"


class Execute(StrEnum):
    """Which ranks run the method."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


register_dispatch_mode(
    Dispatch.RANK_ZERO,
    lambda layout, args, kwargs: [Call(args, kwargs, collect=rank == 0) for rank in range(layout.world_size)],
    lambda layout, results: results[0],
)
register_dispatch_mode(
    Dispatch.ONE_TO_ALL,
    lambda layout, args, kwargs: [Call(args, kwargs)] * layout.world_size,
    lambda layout, results: results,
)
register_dispatch_mode(
    Dispatch.ONE_TO_GROUPS,
    lambda layout, args, kwargs: _call_per_rank(layout, [Call(args, kwargs)] * layout.dp_size),
    _collect_groups,
)
register_dispatch_mode(
    Dispatch.ALL_TO_ALL,
    lambda layout, args, kwargs: _calls_from_entries(layout.world_size, "ranks", args, kwargs),
    lambda layout, results: results,
)
register_dispatch_mode(Dispatch.DP_COMPUTE, _dispatch_entry_per_group, _collect_groups)
register_dispatch_mode(Dispatch.DP_COMPUTE_PROTO, _dispatch_rows, _collect_rows)
register_dispatch_mode(Dispatch.DP_COMPUTE_METRIC, _dispatch_even_rows, _collect_metrics)


# ---- registering methods ------------------------------------------------------------------------------------------

_MARK = "__registered__"


@dataclass(frozen=True)
class Registered:
    """The arguments of `@register`."""

    dispatch_mode: str
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    mesh: str | None = None

    def dispatch(self, layout: Layout, args: tuple, kwargs: dict) -> list[Call | None]:
        """One call per rank; None for a rank that does not run."""
        calls = DISPATCH_MODES[self.dispatch_mode].dispatch(layout, args, kwargs)
        if len(calls) != layout.world_size:
            raise ValueError(
                f"dispatch mode {self.dispatch_mode!r} returned {len(calls)} calls for {layout.world_size} ranks"
            )
        return [c if rank == 0 or self.execute_mode is Execute.ALL else None for rank, c in enumerate(calls)]

    def collect(self, layout: Layout, results: list) -> Any:
        """Combine the results, in rank order, into the value that the caller gets."""
        if self.execute_mode is Execute.RANK_ZERO:
            return results[0]
        return DISPATCH_MODES[self.dispatch_mode].collect(layout, results)


def register(
    dispatch_mode: Dispatch | str,
    execute_mode: Execute | str = Execute.ALL,
    blocking: bool = True,
    mesh: str | None = None,
) -> Callable[[FunctionType], FunctionType]:
    """Make a method of a worker callable through its worker group.

        class Critic(Worker):
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def init_model(self) -> None: ...

            @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
            def update_critic(self, batch: DataProto) -> dict[str, tuple[float, int]]: ...

        group.init_model()                    # on every rank
        metrics = group.update_critic(batch)  # rows split over the data-parallel ranks, (sum, count) merged

    A method that overrides a registered one is registered in the same way.

    Args:
        dispatch_mode: A Dispatch, or a name passed to `register_dispatch_mode`.
        execute_mode: ALL, or RANK_ZERO to run on rank 0 only and return its result unchanged.
        blocking: If False, the method of the group returns a Future immediately.
        mesh: The mesh whose layout is used, for a worker with several (see `Worker.layout`).

    Raises:
        ValueError: The dispatch mode does not exist, or `execute_mode` excludes it.
    """
    mode, execute = str(dispatch_mode), Execute(execute_mode)
    DISPATCH_MODES[mode]  # report an unknown name here, where the worker is defined
    if execute is Execute.RANK_ZERO and mode not in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL):
        raise ValueError(
            f"execute_mode RANK_ZERO requires dispatch_mode RANK_ZERO or ONE_TO_ALL, found {mode}: the arguments of "
            f"the other ranks would be lost"
        )

    def mark(method: FunctionType) -> FunctionType:
        setattr(method, _MARK, Registered(mode, execute, blocking, mesh))
        return method

    return mark


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> str:
    """The dispatch mode of public verl for a mesh: samples are split over the data-parallel ranks of the worker."""
    return Dispatch.DP_COMPUTE_PROTO


def registered_methods(cls: type) -> dict[str, Registered]:
    """The registered methods of a class by name, including inherited ones and unmarked overrides of these."""
    methods: dict[str, Registered] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and _MARK in vars(value):
                methods[name] = vars(value)[_MARK]
    return methods


__getattr__ = published_names(__name__)
