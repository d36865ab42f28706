"""Worker groups of Ray actors: calls, and batches by reference. Failures are in `test_ray_cluster.py`."""

import os
import re
import time
from pathlib import Path

import pytest
import torch

import verl
from verl.dataflow.operator import running
from verl.processes.limits import Limits
from verl.protocol import DataProto
from verl.single_controller import WorkerDied, WorkerSpec, WorkerTimeout
from verl.single_controller.placement import ResourcePool
from verl.single_controller.remote_batch import RemoteTensor

ray = pytest.importorskip("ray")

from verl.single_controller.ray import actor_pool  # noqa: E402
from verl.single_controller.ray.cluster import RayCluster  # noqa: E402
from verl.single_controller.ray.group import RayWorkerGroup, colocate  # noqa: E402
from verl.single_controller.ray.rank_actor import RankActor  # noqa: E402

WORKERS = str(Path(__file__).with_name("pool_workers.py"))


@pytest.fixture
def groups(monkeypatch):
    """Two roles in two actors; the second role replicates its rows on both."""
    monkeypatch.setenv("PYTHONPATH", str(Path(verl.__file__).parents[1]), prepend=os.pathsep)
    pool, limits, env = ResourcePool("two", (2,)), Limits(60, factor=10, minimum=0.5), {"NCCL_SOCKET_IFNAME": "lo"}
    cluster = RayCluster({"num_cpus": 2, "address": "local", "log_to_driver": False}, "cpu", limits, env)
    specs = {"actor": WorkerSpec((WORKERS, "Echo")), "critic": WorkerSpec((WORKERS, "Echo"), {"tp": 2})}
    try:
        yield cluster.start({"two": [("actor", pool), ("critic", pool)]}, specs)
    finally:
        cluster.shutdown()
    assert not ray.is_initialized(), "what was started for the roles ends with them"


def large(rows: int) -> DataProto:
    x = torch.arange(rows)[:, None].expand(rows, 20_000).contiguous()
    return DataProto.from_dict({"x": x}, {"uid": list(range(rows))}, {"step": 1})


def test_calls_and_batches_by_reference(groups):
    actor, critic = groups["actor"], groups["critic"]
    facts = actor.facts()
    assert [(f["RANK"], f["LOCAL_RANK"], f["WORLD_SIZE"]) for f in facts] == [("0", "0", "2"), ("1", "1", "2")]
    assert [f["pid"] for f in critic.facts()] == [f["pid"] for f in facts], "colocated roles share processes"
    assert [f["interface"] for f in facts] == ["lo", "lo"], "the variables that were given reach the processes"
    assert actor.all_reduce(2.0) == [6.0, 6.0]
    small = actor.rows(DataProto.from_dict({"x": torch.arange(1, 6)}))
    assert small.batch["x"].tolist() == [1, 2, 3, 4, 5] and small.batch["rank"].tolist() == [0, 0, 0, 1, 1]

    out = actor.rows(large(8))
    assert type(out.batch["x"]) is RemoteTensor and type(out.batch["rank"]) is torch.Tensor
    reversed_rows = out.copy().reorder([7, 6, 5, 4, 3, 2, 1, 0]).drop(["rank"])
    again = critic.rows(
        reversed_rows.union(DataProto.from_dict({"y": torch.ones(8)}))
    )  # each row goes to the other rank
    assert again.batch["x"][:, 7].tolist() == [7, 6, 5, 4, 3, 2, 1, 0] and again.meta_info == {"step": 1}
    assert out.batch["x"].is_remote and out.batch["x"]._copy is None, "the controller has not seen it"
    assert actor.total(reversed_rows.select(["x"])) == {"x": 3.5 * 20_000}
    check_the_limit_of_a_start(actor)
    check_the_limit_of_a_call(actor, out)


def check_the_limit_of_a_start(actor: RayWorkerGroup) -> None:
    """Actors that are busy do not say where they run, like those that Ray has not started."""
    busy = actor.sleep(0.3)
    with pytest.raises(WorkerTimeout, match=r"Ray has not started all 2 processes after 0.05 s"):
        actor_pool._rank_environments(actor._pool._ranks, False, 0.05)
    assert len(busy.get()) == 2


def check_the_limit_of_a_call(actor: RayWorkerGroup, kept: DataProto) -> None:
    """It is that of calls of the operator so far. The actors end, and their columns with them."""
    with running("gen"):
        assert actor.only_zero() == 0 and len(actor.sleep(0.01).get()) == 2
    limit = actor._pool.durations.limit(("gen", "actor", "only_zero"))
    assert "median" in limit.reason, "also of calls of one rank"
    words = r"no reply after [\d.]+ s from ranks \[0, 1\] .*10 x the median of .*in operator 'gen'"
    with running("gen"), pytest.raises(WorkerTimeout, match=words) as error:
        actor.sleep(60).get()
    stacks = error.value.traceback
    assert stacks.count("in sleep") == 2 and stacks.count("is running") == 2, "a process that responds is running"
    with pytest.raises(WorkerDied, match="column 'x' was lost with the process that held it"):
        kept.batch["x"].sum()


def test_the_stacks_of_an_idle_actor():
    seconds, stacks = RankActor().progress()
    assert seconds is None and "in test_the_stacks_of_an_idle_actor" in stacks


@pytest.mark.slow
def test_what_workers_log_is_seen_once(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(Path(verl.__file__).parents[1]), prepend=os.pathsep)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, address="local")
    try:
        with colocate({"actor": WorkerSpec((WORKERS, "Talker"))}, ResourcePool("two", (2,)), timeout=60)["actor"]:
            shown, deadline = "", time.monotonic() + 20
            while not ("rank 0 has" in shown and "is short" in shown) and time.monotonic() < deadline:
                time.sleep(0.2)
                shown += "".join(capfd.readouterr())
    finally:
        ray.shutdown()
    assert "rank 0 has no value head" in shown and "rank 1 has no value head" not in shown
    assert re.search(r"WARNING rank \d is short of memory", shown)  # Ray shows lines that are alike once, for a while
