"""Worker groups of Ray actors: calls, and batches by reference. Failures are in `test_ray_cluster.py`."""

import os
import re
import socket
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

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
from verl.single_controller import WorkerDied, WorkerTimeout

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


def test_the_rank_of_a_call_that_lost_a_process_of_another_pool(monkeypatch):
    """As Ray reports it; the deaths of real processes are in `test_ray_cluster.py`."""
    ranks = [SimpleNamespace(info=SimpleNamespace(actor_id=f"actor {i}", host=f"host {i}")) for i in range(2)]
    pool, pending = SimpleNamespace(_ranks=ranks), actor_pool._PendingCall("actor", "update", {"reply": 1}, None)
    pool._died = partial(actor_pool.RayPool._died, pool)
    monkeypatch.setattr(ray, "get", Mock(side_effect=ray.exceptions.RayActorError))
    _, _, error = actor_pool.RayPool._read_reply(pool, pending, "reply")
    assert isinstance(error, WorkerDied) and (error.role, error.method, error.rank) == ("actor", "update", 1)
    assert "a process of another pool, which had rows for this call, died" in str(error)


@pytest.mark.parametrize(
    ("listens", "alive", "unavailable", "status", "fault"),
    [
        (False, True, False, None, "Ray (the raylet) no longer runs on it"),
        (True, False, False, None, "its node host is lost"),
        (True, True, True, "running", "the connection from here to host broke; its process still runs"),
        (True, True, True, "zombie", None),
        (True, True, True, None, None),
        (True, True, False, "running", None),
    ],
)
def test_whether_a_node_or_a_process_is_lost(listens, alive, unavailable, status, fault, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        node = {"NodeID": "n", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port, "Alive": alive}
        monkeypatch.setattr(ray, "nodes", lambda: [node])
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "here")
        monkeypatch.setattr(actor_pool, "_status", lambda node, pid: status)
        info = SimpleNamespace(node_id="n", pid=1, host="host")
        found = actor_pool.RayPool._node_fault(None, info, unavailable)
    assert found is fault is None or fault in found


def test_what_a_node_has_in_words():
    nodes = [{"CPU": 2.0, "memory": 9.0}, {"CPU": 4.0, "GPU": 1.0}]
    assert [actor_pool._format_counts(actor_pool._cpus_and_gpus(node)) for node in nodes] == [
        "2 CPU",
        "4 CPU and 1 GPU",
    ]


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
