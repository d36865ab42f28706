"""Ray actors on two nodes: errors of a process that raises, dies, hangs or loses its node."""

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import verl
from verl.processes.limits import Durations, Limits
from verl.protocol import DataProto
from verl.single_controller import WorkerDied, WorkerError, WorkerSpec, WorkerTimeout
from verl.single_controller.placement import ResourcePool

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from verl.single_controller.ray.group import RayWorkerGroup  # noqa: E402

WORKERS = str(Path(__file__).with_name("pool_workers.py"))
pytestmark = pytest.mark.slow
TWO = ResourcePool("two", (2,))


def spec(name: str, **kwargs) -> WorkerSpec:
    return WorkerSpec((WORKERS, name), kwargs)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this host, of 2 CPUs each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(verl.__file__).parents[1]), prepend=os.pathsep)
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        nodes.add_node(num_cpus=2)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


def large(rows: int) -> DataProto:
    x = torch.arange(rows)[:, None].expand(rows, 20_000).contiguous()
    return DataProto.from_dict({"x": x}, {"uid": list(range(rows))}, {"step": 1})


def test_unreferenced_batches_are_dropped(cluster):
    with RayWorkerGroup(spec("Echo"), TWO, timeout=60) as group:
        actor = group._pool._ranks[0].actor

        def stored() -> int:
            return ray.get(actor.__ray_call__.remote(lambda self: len(self._store._batches)))

        kept = [group.rows(large(8)) for _ in range(3)]
        assert stored() == 3
        del kept[1:]
        gc.collect()
        group.only_zero()
        assert stored() == 1 and kept[0].batch["x"].sum() == 28 * 20_000


def test_calls_without_waiting(cluster):
    with RayWorkerGroup(spec("Echo"), TWO, timeout=60) as group:
        group.only_zero()
        start = time.monotonic()
        future = group.sleep(0.5)
        assert time.monotonic() - start < 0.2
        with pytest.raises(TimeoutError):
            future.get(0.05)
        assert group.only_zero() == 0 and len(future.get()) == 2


def test_an_exception_on_one_rank_stops_the_others(cluster):
    group = RayWorkerGroup(spec("Failing"), TWO, name="ref", timeout=60)
    (pid0, _), (pid1, _) = group.pids()
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"ref\.raise_on\(\) on rank 1 \(.*FileNotFoundError: no file a.txt"
    ) as caught:
        group.raise_on(1, "a.txt")
    assert time.monotonic() - start < 2 and "in read_the_file" in caught.value.traceback
    with pytest.raises(WorkerError, match=r"its processes were stopped: ref\.raise_on"):
        group.pids()
    group.shutdown()
    assert gone(pid0) and gone(pid1)


def test_a_killed_process_is_named(cluster):
    group = RayWorkerGroup(spec("Failing"), TWO, name="actor", timeout=60)
    (pid0, _), (pid1, _) = group.pids()
    future = group.wait_in_collective(1)
    with pytest.raises(TimeoutError):
        future.get(1)
    start = time.monotonic()
    os.kill(pid1, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"actor\.wait_in_collective\(\) on rank 1 .*its process died"):
        future.get()
    assert time.monotonic() - start < 1.5
    group.shutdown()
    assert gone(pid0)


def test_a_hang_ends_with_the_stacks_of_all_ranks(cluster):
    group = RayWorkerGroup(spec("Failing"), TWO, name="actor", timeout=60)
    group.pids()
    group._pool.durations = Durations(Limits(1.0))
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"no reply after 1 s from ranks \[0, 1\]") as caught:
        group.wait_in_collective(1).get()
    assert time.monotonic() - start < 4
    assert caught.value.traceback.count("in wait_in_collective") == 2
    group.shutdown()


def test_a_stopped_process_is_named(cluster):
    """Its state is read by another process of its node."""
    group = RayWorkerGroup(spec("Failing"), TWO, name="actor", timeout=60)
    (pid0, _), (pid1, _) = group.pids()
    group._pool.durations = Durations(Limits(2.0))
    os.kill(pid1, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=rf"rank 1 \(process {pid1}\) is stopped: SIGSTOP") as caught:
        group.wait_in_collective(1).get()
    assert caught.value.rank == 1 and "in wait_in_collective" in caught.value.traceback
    group.shutdown()
    assert gone(pid0) and gone(pid1)


def test_a_queued_call_does_not_time_out(cluster):
    """The deadline of a call counts from when the ranks start it, not from when it was submitted."""
    with RayWorkerGroup(spec("Echo"), TWO, timeout=60) as group:
        group.only_zero()
        group._pool.durations = Durations(Limits(1.0))
        futures = [group.sleep(0.7) for _ in range(3)]
        assert [len(f.get()) for f in reversed(futures)] == [2, 2, 2]


def test_a_worker_that_cannot_be_constructed_frees_its_resources(cluster):
    with pytest.raises(WorkerError, match=r"ref.__init__\(\) on rank 1 .*RuntimeError: no such model"):
        RayWorkerGroup(spec("Failing", fail_on_rank=1), TWO, name="ref", timeout=60)
    with RayWorkerGroup(spec("Echo"), ResourcePool("all", (2, 2)), timeout=60, start_timeout=30) as group:
        assert [f["LOCAL_RANK"] for f in group.facts()] == ["0", "1"] * 2


def test_missing_resources_are_reported(cluster):
    with pytest.raises(ValueError, match=r"'big' requires 3 nodes with 1 CPU.* within 1 s; it has 2 nodes with 2 CPU"):
        RayWorkerGroup(spec("Echo"), ResourcePool("big", (1, 1, 1)), start_timeout=1)


def test_the_loss_of_a_node_is_named(cluster):
    node = cluster.add_node(num_cpus=2)
    group = RayWorkerGroup(spec("Failing"), ResourcePool("all", (1, 1, 1)), name="actor", timeout=60, start_timeout=30)
    future = group.submit("raise_on", 99, "")
    time.sleep(0.5)
    start = time.monotonic()
    cluster.remove_node(node)
    with pytest.raises(WorkerDied, match=r"actor\.raise_on\(\) on rank \d .*its node .* is lost"):
        future.get()
    assert time.monotonic() - start < 10
    group.shutdown()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        if not os.path.exists(f"/proc/{pid}"):
            return True
        time.sleep(0.05)
    return False
