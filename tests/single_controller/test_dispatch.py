"""Dispatch and collect as pure functions: no worker, no process."""

import functools
import math

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.dispatch import (
    Call,
    Coordinates,
    Dispatch,
    Execute,
    Layout,
    Registered,
    merge_metrics,
    register,
    register_dispatch_mode,
    registered_methods,
)


@functools.cache
def rows(n: int) -> DataProto:
    """n rows: a number, a vector, and an object that says which row it is."""
    return DataProto.from_dict(
        {"x": torch.arange(n), "y": torch.arange(2 * n).view(n, 2).float()},
        {"uid": [f"row {i}" for i in range(n)], "lists": [[i] * (i % 3) for i in range(n)]},
        {"temperature": 0.7},
    )


def assert_same(a: DataProto, b: DataProto) -> None:
    assert a.columns == b.columns
    assert torch.equal(a.batch["x"], b.batch["x"]) and torch.equal(a.batch["y"], b.batch["y"])
    assert a.non_tensor_batch["uid"].tolist() == b.non_tensor_batch["uid"].tolist()
    assert a.non_tensor_batch["lists"].tolist() == b.non_tensor_batch["lists"].tolist()


def run(how: Registered, layout: Layout, worker, *args, **kwargs):
    """What a group does, with a function in the place of the workers."""
    calls = how.dispatch(layout, args, kwargs)
    results = [None if c is None else c.finish(worker(rank, *c.args, **c.kwargs)) for rank, c in enumerate(calls)]
    return how.collect(layout, results)


#: (dp, tp, pp)
MESHES = [(d, t, p) for d in range(1, 65) for t in range(1, 65) for p in range(1, 65) if d * t * p <= 64]


@pytest.mark.parametrize("most", [24, pytest.param(64, marks=pytest.mark.slow)])
def test_round_trip_on_every_mesh(most):
    """distribute -> identity -> collect gives the batch back for each (dp, tp, pp), also when dp does not divide it."""
    how, batch = Registered(Dispatch.DP_COMPUTE_PROTO), rows(13)
    assert [Layout.grid(**{axis: 3}).shape for axis in ("dp", "tp", "pp")] == [(3, 1, 1), (1, 3, 1), (1, 1, 3)]
    seen = {}
    for d, t, p in (mesh for mesh in MESHES if math.prod(mesh) <= most):
        layout = Layout.grid(dp=d, tp=t, pp=p)
        calls = how.dispatch(layout, (batch,), {})
        for rank, call in enumerate(calls):
            c = layout.coordinates[rank]
            assert rank == (c.pp * d + c.dp) * t + c.tp  # tp fastest, pp slowest
            seen[c.dp] = seen.get(c.dp, call.args) if c.tp or c.pp else call.args
            assert call.args is seen[c.dp]  # replicas share one object, so it can be sent once
            assert call.collect == (c.tp == 0 and c.pp == p - 1)
            assert len(call.args[0]) == -(-13 // d)
        results = [c.finish(c.args[0]) for c in calls]
        assert [r is not None for r in results] == [c.collect for c in calls]
        assert_same(how.collect(layout, results), batch)
    assert len(MESHES) == sum(1 for a in range(1, 65) for b in range(1, 65) for _ in range(64 // (a * b)))


def rows_by_stage(layout: Layout, args: tuple, kwargs: dict) -> list[Call]:
    """A custom mode: the rows are split over the pipeline stages, the last one gets the remainder."""
    (batch,), stages = args, layout.shape[2]
    share = len(batch) // stages
    parts = [batch[i * share : (i + 1) * share if i + 1 < stages else len(batch)] for i in range(stages)]
    return [Call((parts[c.pp],), collect=c.dp == c.tp == 0) for c in layout.coordinates]


def join_stages(layout: Layout, results: list) -> DataProto:
    by_stage = sorted((c.pp, r) for r, c in enumerate(layout.coordinates) if results[r] is not None)
    return DataProto.concat([results[r] for _, r in by_stage])


def test_round_trip_of_every_mode_on_every_mesh_up_to_24_ranks():
    """The identity on every rank gives back what went in, in the form that each mode promises."""
    register_dispatch_mode("ROWS_BY_STAGE", rows_by_stage, join_stages)
    identity, count = lambda rank, x: x, lambda rank, b: {"x": (float(b.batch["x"].sum()), len(b))}
    for d, t, p in (mesh for mesh in MESHES if math.prod(mesh) <= 24):
        layout = Layout.grid(dp=d, tp=t, pp=p)
        world, uneven, even = d * t * p, rows(d + 1), rows(d)
        assert run(Registered(Dispatch.RANK_ZERO), layout, identity, "x") == "x"
        assert run(Registered(Dispatch.ONE_TO_ALL), layout, identity, "x") == ["x"] * world
        assert run(Registered(Dispatch.ONE_TO_GROUPS), layout, identity, "x") == ["x"] * d
        assert run(Registered(Dispatch.ALL_TO_ALL), layout, identity, list(range(world))) == list(range(world))
        assert run(Registered(Dispatch.DP_COMPUTE), layout, identity, list(range(d))) == list(range(d))
        assert_same(run(Registered(Dispatch.DP_COMPUTE_PROTO, mesh="other"), layout, identity, uneven), uneven)
        assert run(Registered(Dispatch.DP_COMPUTE_METRIC), layout, count, even) == {"x": (d - 1) / 2}
        assert_same(run(Registered("ROWS_BY_STAGE"), layout, identity, rows(p + 2)), rows(p + 2))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9])
def test_padding_and_unpadding(n):
    """Each rank gets ceil(n / dp) rows; what fills up never comes back, also when there are fewer rows than ranks."""
    layout, sizes = Layout.grid(dp=4, tp=2), []

    def worker(rank, batch, scale, other):
        sizes.append(len(batch))
        assert other.non_tensor_batch["uid"].tolist() == batch.non_tensor_batch["uid"].tolist()
        return DataProto.from_dict({"x": batch.batch["x"] * scale}, {"uid": batch.non_tensor_batch["uid"]})

    out = run(Registered(Dispatch.DP_COMPUTE_PROTO), layout, worker, rows(n), scale=3, other=rows(n))
    assert out.batch["x"].tolist() == [3 * i for i in range(n)]
    assert out.non_tensor_batch["uid"].tolist() == [f"row {i}" for i in range(n)]
    assert sizes == [-(-n // 4)] * 8


def test_ranks_in_any_order_keep_the_rows_in_order():
    """The layout decides, not the rank number: dp coordinates run backwards here."""
    layout = Layout(tuple(Coordinates(dp=3 - r) for r in range(4)))
    assert layout.collect_ranks == (3, 2, 1, 0)
    out = run(Registered(Dispatch.DP_COMPUTE_PROTO), layout, lambda rank, b: b, rows(8))
    assert_same(out, rows(8))


def test_the_last_stage_and_the_first_tp_rank_return_the_result():
    layout = Layout.grid(dp=2, tp=2, pp=2)
    worker = lambda rank, b: DataProto.from_dict({"x": torch.full((len(b),), rank)})  # noqa: E731
    out = run(Registered(Dispatch.DP_COMPUTE_PROTO), layout, worker, rows(4))
    assert out.batch["x"].tolist() == [4, 4, 6, 6]  # pp 1 holds ranks 4..7: dp 0 has 4 and 5, dp 1 has 6 and 7


def test_empty_and_unequal_batches_raise():
    how, layout = Registered(Dispatch.DP_COMPUTE_PROTO), Layout.grid(dp=2)
    with pytest.raises(ValueError, match="batch without rows"):
        how.dispatch(layout, (rows(2)[:0],), {})
    with pytest.raises(ValueError, match=r"same number of rows, found \{'argument 0': 2, 'other': 3\}"):
        how.dispatch(layout, (rows(2),), {"other": rows(3)})


def test_a_batch_of_meta_info_alone_goes_to_every_rank():
    calls = Registered(Dispatch.DP_COMPUTE_PROTO).dispatch(Layout.grid(dp=3), (DataProto(meta_info={"a": 1}),), {})
    assert [c.args[0].meta_info for c in calls] == [{"a": 1}] * 3 and [c.padding for c in calls] == [0] * 3


def test_a_result_with_unidentifiable_padding_raises():
    twice = lambda rank, b: b.repeat(2)  # noqa: E731
    how = Registered(Dispatch.DP_COMPUTE_PROTO)
    assert len(run(how, Layout.grid(dp=2), twice, rows(4))) == 8
    with pytest.raises(ValueError, match="got 2 rows, 1 of them padding, and returned 4"):
        run(how, Layout.grid(dp=2), twice, rows(3))


def test_results_other_than_a_batch():
    how, layout = Registered(Dispatch.DP_COMPUTE_PROTO), Layout.grid(dp=2)
    assert run(how, layout, lambda rank, b: None, rows(2)) is None
    with pytest.raises(ValueError, match="expected a DataProto from every rank, found float from rank 1"):
        run(how, layout, lambda rank, b: 1.0 if rank else b, rows(2))


def test_metrics_of_a_batch_are_merged():
    worker = lambda rank, b: DataProto(meta_info={"metrics": {"len": (10.0 * rank, 1 + rank)}})  # noqa: E731
    out = run(Registered(Dispatch.DP_COMPUTE_PROTO), Layout.grid(dp=2), worker, rows(4))
    assert out.meta_info["metrics"] == {"len": (10.0, 3)}


def test_timing_of_a_batch_is_that_of_the_slowest_rank():
    worker = lambda rank, b: DataProto(meta_info={"timing": {"load": 1.0 + rank, "run": 5.0 - rank}})  # noqa: E731
    for n, expected in [(1, {"load": 1.0, "run": 5.0}), (2, {"load": 2.0, "run": 5.0})]:
        out = run(Registered(Dispatch.DP_COMPUTE_PROTO), Layout.grid(dp=n), worker, rows(4))
        assert out.meta_info["timing"] == expected


def test_metrics_merge_exactly():
    """The mean over uneven groups is total / count, not the mean of the groups' means (which would be 5.5 here)."""
    groups = [{"loss": (3.0, 3), "grad_norm": 0.25}, {"loss": (10.0, 1), "grad_norm": 0.25}]
    assert merge_metrics(groups) == {"loss": 3.25, "grad_norm": 0.25}
    assert merge_metrics([{"a": (1.0, 1)}, {"b": 2}]) == {"a": 1.0, "b": 2.0}
    assert merge_metrics([{"a": (0.0, 0)}]) == {} and math.isnan(merge_metrics([{"a": math.nan}] * 2)["a"])
    with pytest.raises(ValueError, match=r"'grad_norm' differs between the data-parallel ranks: \[1.0, 2.0\]"):
        merge_metrics([{"grad_norm": 1.0}, {"grad_norm": 2.0}])
    with pytest.raises(ValueError, match="differs"):
        merge_metrics([{"grad_norm": 1.0}, {"grad_norm": math.nan}])
    with pytest.raises(ValueError, match="'x': expected numbers or pairs"):
        merge_metrics([{"x": [1.0]}])


def test_a_metric_method_never_counts_a_row_twice():
    how, worker = Registered(Dispatch.DP_COMPUTE_METRIC), lambda rank, b: {"x": (b.batch["x"].sum().item(), len(b))}
    assert run(how, Layout.grid(dp=2, tp=2), worker, rows(6)) == {"x": 2.5}
    with pytest.raises(ValueError, match="got 5 rows for 2 data-parallel ranks: expected a multiple of 2"):
        run(how, Layout.grid(dp=2), worker, rows(5))
    with pytest.raises(ValueError, match="expected a dict of metrics from every rank, found NoneType from rank 0"):
        run(how, Layout.grid(dp=2), lambda rank, b: None, rows(4))


def test_the_modes_without_rows():
    layout, worker = Layout.grid(dp=2, tp=2), lambda rank, *args, **kwargs: (rank, args, kwargs)
    same = [(r, (1,), {"k": 2}) for r in range(4)]
    assert run(Registered(Dispatch.ONE_TO_ALL), layout, worker, 1, k=2) == same
    assert run(Registered(Dispatch.RANK_ZERO), layout, worker, 1, k=2) == same[0]
    ran = []
    zero = Registered(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    assert run(zero, layout, lambda rank: ran.append(rank) or rank) == 0 and ran == [0]
    each = run(Registered(Dispatch.ALL_TO_ALL), layout, worker, list("abcd"), k=[5, 6, 7, 8])
    assert each == [(r, ("abcd"[r],), {"k": 5 + r}) for r in range(4)]
    per_dp = run(Registered(Dispatch.DP_COMPUTE), layout, worker, ["a", "b"])
    assert per_dp == [(0, ("a",), {}), (2, ("b",), {})]
    with pytest.raises(ValueError, match="argument k: expected a list with one entry for each of the 4 ranks, found a"):
        run(Registered(Dispatch.ALL_TO_ALL), layout, worker, k=[1])


def test_a_layout_holds_every_point_once():
    for bad in [(), (Coordinates(1),), (Coordinates(0), Coordinates(0)), (Coordinates(0), Coordinates(1, 1))]:
        with pytest.raises(ValueError, match="exactly one rank at every point"):
            Layout(bad)


def test_a_custom_dispatch_mode():
    """The paper's 3D_PP_ONLY: the same arguments for all ranks, one result per pipeline stage."""

    def one_per_stage(layout, results):
        return [r for r, c in zip(results, layout.coordinates) if c.tp == 0 and c.dp == 0]

    send = lambda layout, args, kwargs: [Call(args, kwargs)] * layout.world_size  # noqa: E731
    register_dispatch_mode("PP_ONLY", send, one_per_stage)
    layout = Layout.grid(dp=2, tp=2, pp=3)
    assert run(Registered("PP_ONLY"), layout, lambda rank, x: (rank, x), "names") == [(r, "names") for r in (0, 4, 8)]
    with pytest.raises(ValueError, match="registered already"):
        register_dispatch_mode("PP_ONLY", send, one_per_stage)
    register_dispatch_mode("TOO_FEW", lambda layout, args, kwargs: [Call()], one_per_stage)
    with pytest.raises(ValueError, match="'TOO_FEW' returned 1 calls for 12 ranks"):
        run(Registered("TOO_FEW"), layout, lambda rank: None)


def test_marks_are_inherited_and_checked():
    class Base:
        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        def init_model(self): ...

        @register(Dispatch.DP_COMPUTE_METRIC)
        def update(self, batch): ...

        def helper(self): ...

    class Child(Base):
        def init_model(self): ...

        @register(Dispatch.RANK_ZERO)
        def update(self, batch): ...

    assert registered_methods(Child) == {
        "init_model": Registered("ONE_TO_ALL", Execute.ALL, False),
        "update": Registered("RANK_ZERO"),
    }
    with pytest.raises(ValueError, match="did you mean 'DP_COMPUTE'"):
        register("DP_COMPUT")
    with pytest.raises(ValueError, match="arguments of the other ranks would be lost"):
        register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)


def test_rows_are_not_copied():
    """Neither by the split over ranks nor by the collection of one group."""
    how, batch = Registered(Dispatch.DP_COMPUTE_PROTO), rows(8)
    collected = how.collect(Layout.grid(tp=2), [batch, None])
    assert collected.batch["x"].data_ptr() == batch.batch["x"].data_ptr() and collected is not batch
    assert_same(collected, batch)
    calls = how.dispatch(Layout.grid(dp=4), (batch,), {})
    start = batch.batch["y"].untyped_storage().data_ptr()
    assert all(c.args[0].batch["y"].untyped_storage().data_ptr() == start for c in calls)
    assert isinstance(calls[1].args[0].non_tensor_batch["uid"], np.ndarray)
