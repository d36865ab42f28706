"""Worker groups of both executors, processes and Ray actors, and what both promise."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import verl
from verl.protocol import DataProto
from verl.single_controller import LocalWorkerGroup, WorkerGroup, WorkerSpec
from verl.single_controller.cluster import ResourcePool
from verl.single_controller.remote_batch import RemoteTensor

WORKERS = str(Path(__file__).with_name("pool_workers.py"))
WIDTH = 20_000  # of columns that stay where they are
TWO = ResourcePool("two", (2,))


def spec(name: str, **kwargs) -> WorkerSpec:
    return WorkerSpec((WORKERS, name), kwargs)


@pytest.fixture(scope="module")
def two_nodes():
    """A Ray cluster of two nodes on this host, of 2 CPUs each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(verl.__file__).parents[1]), prepend=os.pathsep)
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        nodes.add_node(num_cpus=2)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.slow)])
def executor(request) -> str:
    if request.param == "ray":
        request.getfixturevalue("two_nodes")
    return request.param


def start(executor: str, worker: str, role: str) -> WorkerGroup:
    """A group of two ranks."""
    if executor == "processes":
        return LocalWorkerGroup(spec(worker), 2, role, timeout=60)
    from verl.single_controller.ray.cluster import RayWorkerGroup

    return RayWorkerGroup(spec(worker), TWO, role, timeout=60)


def wide(rows: int) -> DataProto:
    x = torch.arange(rows)[:, None].expand(rows, WIDTH).contiguous()
    return DataProto.from_dict({"x": x}, {"uid": [*range(rows)]}, {"step": 1})


# ---- two roles, actor and critic, in two processes; the critic replicates its rows on both --------------------------

Groups = Mapping[str, WorkerGroup]


def check_ranks(groups: Groups) -> None:
    facts = groups["actor"].facts()
    assert [f["rank"] for f in facts] == [0, 1] and len({f["pid"] for f in facts} | {os.getpid()}) == 3
    assert [(f["RANK"], f["LOCAL_RANK"], f["WORLD_SIZE"]) for f in facts] == [("0", "0", "2"), ("1", "1", "2")]
    assert facts[0]["MASTER_PORT"] == facts[1]["MASTER_PORT"] and facts[0]["MASTER_ADDR"] == "127.0.0.1"
    assert [f["interface"] for f in facts] == ["lo", "lo"], "the variables that were given reach the processes"
    assert [f["pid"] for f in groups["critic"].facts()] == [f["pid"] for f in facts], "colocated roles share processes"
    assert groups["actor"].all_reduce(2.0) == [6.0, 6.0], "the ranks meet by the environment"  # 2 * 1 + 2 * 2


def check_rows(groups: Groups) -> None:
    """They go out and come back in order."""
    batch = DataProto.from_dict({"x": torch.arange(1, 6)}, {"uid": list("abcde")}, {"step": 1})
    for role, ranks in [("actor", [0, 0, 0, 1, 1]), ("critic", [0, 0, 0, 0, 0])]:
        out = groups[role].rows(batch)
        assert out.batch["x"].tolist() == [1, 2, 3, 4, 5] and out.non_tensor_batch["uid"].tolist() == list("abcde")
        assert out.batch["rank"].tolist() == ranks and out.meta_info == {"step": 1}
    assert batch.batch["x"].tolist() == [1, 2, 3, 4, 5], "what a rank writes into its rows stays there"
    assert groups["actor"].total(batch[:4]) == {"x": 2.5}


def check_large_columns(groups: Groups) -> None:
    """They go from rank to rank and not through the controller."""
    actor, out = groups["actor"], groups["actor"].rows(wide(8))
    assert type(out.batch["x"]) is RemoteTensor and type(out.batch["rank"]) is torch.Tensor
    reversed_rows = out.copy().reorder([7, 6, 5, 4, 3, 2, 1, 0]).drop(["rank"])
    more = reversed_rows.union(DataProto.from_dict({"y": torch.ones(8)}))
    assert groups["critic"].rows(more).batch["x"][:, 7].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]  # it zeroes what it got
    assert actor.total(reversed_rows.select(["x"])) == {"x": 3.5 * WIDTH}, "each rank writes into its own copy"
    assert out.batch["x"].is_remote and out.batch["x"]._copy is None, "the controller has not seen it"
    assert out.batch["x"][2:4].sum() == 5 * WIDTH and torch.equal(out.batch["x"][[5, 1]][:, 0], torch.tensor([5, 1]))
    assert actor.total(out[[1, 6, 6, 0]].select(["x"])) == {"x": 13 / 4 * WIDTH}
    out.batch["x"].add_(1)  # modified locally: the local copy is sent from now on
    assert actor.total(out.select(["x"])) == {"x": 4.5 * WIDTH}


def check_order(groups: Groups) -> None:
    """Calls without waiting run one after another."""
    groups["critic"].only_zero()
    begun = time.monotonic()
    slow, after = groups["actor"].sleep(0.5), groups["critic"].submit("only_zero")
    assert time.monotonic() - begun < 0.2
    with pytest.raises(TimeoutError, match=r"actor.sleep\(\) has not finished after 0.05 s"):
        slow.get(timeout=0.05)
    assert after.get(timeout=10) == 0 and time.monotonic() - begun > 0.5
    assert max(slow.get()) <= time.monotonic()
