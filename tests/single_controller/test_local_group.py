"""Worker groups of one worker, in this process."""

import gc
import traceback
from types import SimpleNamespace

import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller import Dispatch, Execute, Future, LocalWorkerGroup, Worker, WorkerSpec, colocate, register
from verl.single_controller.cluster import ResourcePool
from verl.single_controller.dispatch import Coordinates
from verl.single_controller.local import cluster as local_clusters
from verl.single_controller.local.cluster import InProcessPool, make_pool


class Scaler(Worker):
    def __init__(self, scale: float = 2.0):
        self.scale = scale
        self.rank_seen_by_init = self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def multiply(self, batch: DataProto) -> DataProto:
        """Multiply x."""
        return DataProto.from_dict({"y": batch.batch["x"] * self.scale})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def take_column(self, batch: DataProto) -> DataProto:
        return batch.pop(["x"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> dict:
        return {"x": (batch.batch["x"].sum().item(), len(batch)), "scale": self.scale}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def where(self) -> dict:
        return self.env

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def fail(self, what: str) -> None:
        raise KeyError(what)

    def helper(self) -> None: ...


def batch(n: int = 3) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n).float()})


def test_a_group_call_is_a_method_call():
    group = LocalWorkerGroup(WorkerSpec(Scaler, {"scale": 5.0}))
    assert group.multiply(batch()).batch["y"].tolist() == [0.0, 5.0, 10.0]
    assert group.multiply(batch=batch(1)).batch["y"].tolist() == [0.0]
    assert group.update(batch()) == {"x": 1.0, "scale": 5.0}
    assert group.multiply.__doc__ == "Multiply x." and group.world_size == 1
    assert group.layout().coordinates == (Coordinates(0, 0, 0),)
    assert group.worker.rank_seen_by_init == 0


def test_what_a_worker_does_to_its_batch_stays_with_the_worker():
    """As it would between processes: columns taken away by the worker are still there for the caller."""
    mine = batch()
    assert "x" in LocalWorkerGroup(WorkerSpec(Scaler)).take_column(mine) and "x" in mine


def test_futures():
    group = LocalWorkerGroup(WorkerSpec(Scaler))
    future = group.where()
    assert isinstance(future, Future)
    (env,) = future.get(timeout=1)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["MASTER_ADDR"]) == ("0", "1", "0", "127.0.0.1")
    assert 0 < int(env["MASTER_PORT"]) < 65536 and future.get() == [env]
    assert group.submit("multiply", batch(1)).get().batch["y"].tolist() == [0.0]


def test_a_future_remembers_its_outcome_but_not_a_timeout():
    outcomes = [TimeoutError("not yet"), KeyError("broken")]

    def wait(timeout):
        raise outcomes.pop(0)

    future = Future(wait)
    with pytest.raises(TimeoutError):
        future.get(0.1)
    for _ in range(2):
        with pytest.raises(KeyError, match="broken"):
            future.get()


def test_an_error_keeps_its_traceback():
    group = LocalWorkerGroup(WorkerSpec(Scaler), name="actor")
    with pytest.raises(KeyError, match="no such thing") as caught:
        group.fail("no such thing")
    assert caught.value.__notes__ == ["in actor.fail(), rank 0 of 1, in this process"]
    assert [f.name for f in traceback.extract_tb(caught.value.__traceback__)][-1] == "fail"
    with pytest.raises(ValueError, match="without rows") as caught:
        group.multiply(batch()[:0])
    assert caught.value.__notes__ == ["in the arguments of actor.multiply()"]


def test_an_unknown_method_is_named():
    group = LocalWorkerGroup(WorkerSpec(Scaler))
    with pytest.raises(AttributeError, match=r"registers no method 'multipy'.*did you mean 'multiply'"):
        group.multipy(batch())
    with pytest.raises(AttributeError, match="mark it with @register"):
        group.helper()
    with pytest.raises(ValueError, match="registers no method 'helper'"):
        group.submit("helper")


def test_a_name_of_the_group_cannot_be_registered():
    class Taken(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def shutdown(self): ...

    with pytest.raises(ValueError, match=r"Taken.shutdown\(\) cannot be registered"):
        LocalWorkerGroup(WorkerSpec(Taken))


def test_a_mesh_by_name():
    class TwoMeshes(Worker):
        def layout(self, mesh=None):
            return Coordinates() if mesh == "rollout" else super().layout(mesh)

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="rollout")
        def generate(self, batch):
            return batch

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="other")
        def other(self, batch):
            return batch

    group = LocalWorkerGroup(WorkerSpec(TwoMeshes))
    assert group.generate(batch()).batch["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="TwoMeshes has no mesh 'other'"):
        group.other(batch())


def test_roles_in_one_process():
    groups = colocate({"small": WorkerSpec(Scaler, {"scale": 1.0}), "large": WorkerSpec(Scaler, {"scale": 9.0})})
    assert [groups[r].multiply(batch(2)).batch["y"][1].item() for r in ("small", "large")] == [1.0, 9.0]
    assert repr(groups["large"]) == "LocalWorkerGroup(large, Scaler, world_size=1)"
    pool = groups["small"]._pool
    del groups["small"]  # a role ends with its group
    gc.collect()
    assert pool.roles == {"large"}


def test_without_a_number_there_is_one_worker_in_this_process():
    assert isinstance(make_pool({"actor": WorkerSpec(Scaler)}), InProcessPool)


def test_a_worker_class_by_address(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.single_controller import Dispatch, Worker, register\n"
        "class Mine(Worker):\n"
        "    @register(dispatch_mode=Dispatch.RANK_ZERO)\n"
        "    def hello(self): return 'hello'\n"
        "class NoWorker: ...\n"
    )
    path = str(tmp_path / "mine.py")
    with LocalWorkerGroup(WorkerSpec((path, "Mine"))) as group:
        assert group.hello() == "hello"
    with pytest.raises(ValueError, match=r"expected a subclass of verl\.single_controller\.Worker"):
        LocalWorkerGroup(WorkerSpec((path, "NoWorker")))


def test_a_worker_constructed_directly_is_rank_zero_of_one():
    worker = Scaler(scale=3.0)
    assert (worker.rank, worker.world_size, worker.local_rank) == (0, 1, 0)
    assert worker.multiply(batch(2)).batch["y"].tolist() == [0.0, 3.0]


@pytest.mark.parametrize(
    ("device", "given", "of_workers", "here"),
    [
        ("cpu", {}, ["10", "10"], 10),  # 3 ranks
        ("cuda", {}, ["7", "7"], 7),  # and this process, which works at the same time
        ("cuda", {"OMP_NUM_THREADS": "5"}, ["5", "5"], 30),  # of trainer.worker_env
    ],
)
def test_the_processes_of_all_pools_share_the_cores(device, given, of_workers, here, monkeypatch):
    """More threads than cores delay every parallel region by milliseconds while another process works."""
    found, before = [], torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local_clusters, "resolve_device", lambda name: torch.device(name))
    monkeypatch.setattr(local_clusters, "colocate", lambda specs, n, **how: found.append(how["env"]) or {})
    pools = {"actor": [("actor", ResourcePool("actor", (2,)))], "rollout": [("rollout", ResourcePool("rollout", (1,)))]}
    cluster = local_clusters.ProcessCluster(device, env=given)
    torch.set_num_threads(30)
    try:
        cluster.start(pools, {"actor": WorkerSpec(Scaler), "rollout": WorkerSpec(Scaler)})
        assert [env["OMP_NUM_THREADS"] for env in found] == of_workers and torch.get_num_threads() == here
        cluster.shutdown()
        assert torch.get_num_threads() == 30
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"backend": "ray"}, "trainer.backend is ray, but this trainer does not use it"),
        ({"nnodes": 2}, "trainer.nnodes is 2, but trainer.backend=local runs on one host"),
        ({"n_gpus_per_node": 2}, "trainer.n_gpus_per_node is 2, but InProcessCluster has one process"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_settings_that_one_process_cannot_use_are_refused(changed, message):
    def check(**trainer):
        local_clusters.InProcessCluster().check(SimpleNamespace(trainer=SimpleNamespace(**trainer)))

    fits = {"backend": "local", "nnodes": 1, "n_gpus_per_node": 1, "device": "cpu"}
    check(**fits)
    with pytest.raises(ValueError, match=message):
        check(**fits | changed)
