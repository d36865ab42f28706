"""Worker groups of Ray actors: calls, and batches by reference. Failures are in `test_ray_cluster.py`."""

import os
import re
import time
from pathlib import Path

import pytest

import verl
from tests.single_controller.conftest import (
    TWO,
    WIDTH,
    check_large_columns,
    check_order,
    check_ranks,
    check_rows,
    spec,
    wide,
)
from verl.dataflow.operator import running
from verl.processes.limits import Limits
from verl.protocol import DataProto
from verl.single_controller import WorkerTimeout

ray = pytest.importorskip("ray")

from verl.single_controller.ray import actor_pool, rank_actor  # noqa: E402
from verl.single_controller.ray.cluster import (  # noqa: E402
    RayCluster,
    RayWorkerGroup,
    colocate,
)
from verl.single_controller.ray.rank_actor import RankActor  # noqa: E402


@pytest.fixture
def groups(monkeypatch):
    """Two roles in two actors; the second role replicates its rows on both."""
    monkeypatch.setenv("PYTHONPATH", str(Path(verl.__file__).parents[1]), prepend=os.pathsep)
    limits, env = Limits(60, factor=10, minimum=0.5), {"NCCL_SOCKET_IFNAME": "lo"}
    cluster = RayCluster({"num_cpus": 2, "address": "local", "log_to_driver": False}, "cpu", limits, env)
    try:
        yield cluster.start(
            {"two": [("actor", TWO), ("critic", TWO)]}, {"actor": spec("Echo"), "critic": spec("Echo", tp=2)}
        )
    finally:
        cluster.shutdown()
    assert not ray.is_initialized(), "what was started for the roles ends with them"


@pytest.mark.slow
def test_calls_and_batches_by_reference(groups):
    """Of the runs that are not slow, one in tests/trainer/test_executors.py is on Ray."""
    for check in (check_ranks, check_rows, check_large_columns, check_order):
        check(groups)
    actor = groups["actor"]
    kept = actor.rows(wide(8))
    check_the_limit_of_a_start(actor)
    check_the_limit_of_a_call(actor, kept)


def check_the_limit_of_a_start(actor: RayWorkerGroup) -> None:
    """Actors that are busy do not say where they run, like those that Ray has not started."""
    busy = actor.sleep(0.3)
    with pytest.raises(WorkerTimeout, match=r"Ray has not started all 2 processes after 0.05 s"):
        actor_pool._rank_environments(actor._pool._ranks, False, 0.05)
    assert len(busy.get()) == 2


def check_the_limit_of_a_call(actor: RayWorkerGroup, kept: DataProto) -> None:
    """It is that of calls of the operator so far. The actors end; the columns on living nodes can still be read."""
    with running("gen"):
        assert actor.only_zero() == 0 and len(actor.sleep(0.01).get()) == 2
    limit = actor._pool.durations.limit(("gen", "actor", "only_zero"))
    assert "median" in limit.reason, "also of calls of one rank"
    words = r"no reply after [\d.]+ s from ranks \[0, 1\] .*10 x the median of .*in operator 'gen'"
    with running("gen"), pytest.raises(WorkerTimeout, match=words) as error:
        actor.sleep(60).get()
    stacks = error.value.traceback
    assert stacks.count("in sleep") == 2 and stacks.count("is running") == 2, "a process that responds is running"
    assert kept.batch["x"].sum() == 28 * WIDTH


def test_the_stacks_of_an_idle_actor(monkeypatch):
    monkeypatch.setattr(rank_actor, "redact_output", lambda: None)
    seconds, stacks = RankActor({}).progress()
    assert seconds is None and "in test_the_stacks_of_an_idle_actor" in stacks


@pytest.mark.slow
def test_what_workers_log_is_seen_once(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(Path(verl.__file__).parents[1]), prepend=os.pathsep)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, address="local")
    try:
        with colocate({"actor": spec("Talker")}, TWO, timeout=60)["actor"]:
            shown, deadline = "", time.monotonic() + 20
            while not ("rank 0 has" in shown and "is short" in shown) and time.monotonic() < deadline:
                time.sleep(0.2)
                shown += "".join(capfd.readouterr())
    finally:
        ray.shutdown()
    assert "rank 0 has no value head" in shown and "rank 1 has no value head" not in shown
    assert re.search(r"WARNING rank \d is short of memory", shown)  # Ray shows lines that are alike once, for a while
