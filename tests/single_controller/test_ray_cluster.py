"""Ray actors on two nodes: batches that are dropped, and errors of processes and nodes.

Calls, and errors that processes of one host report as well, are in `test_ray_group.py` and `test_process_pool.py`.
"""

import gc
import os
import re
import signal
import time

import pytest

from tests.single_controller.conftest import TWO, WIDTH, spec, start, wide
from tests.waiting import gone, wait_until
from verl.processes.limits import Durations, Limits
from verl.single_controller import WorkerDied, WorkerError, WorkerTimeout
from verl.single_controller.cluster import ResourcePool

ray = pytest.importorskip("ray")

from verl.single_controller.ray.cluster import RayWorkerGroup  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_nodes")]


def test_unreferenced_batches_are_dropped():
    from ray._private.internal_api import memory_summary

    def stored() -> int:
        """Objects in the stores of all nodes."""
        summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
        return sum(map(int, re.findall(r"Plasma memory usage \d+ MiB, (\d+) objects", summary)))

    with start("ray", "Echo", "actor") as group:
        kept = [group.rows(wide(8)) for _ in range(3)]
        assert stored() >= 3 * 2
        del kept[1:]
        gc.collect()
        wait_until(lambda: stored() == 2)
        assert kept[0].batch["x"].sum() == 28 * WIDTH


def test_a_hang_ends_with_the_stacks_of_all_ranks():
    group = start("ray", "Failing", "actor")
    group.pids()
    group._pool.durations = Durations(Limits(1.0))
    begun = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"no reply after 1 s from ranks \[0, 1\]") as caught:
        group.wait_in_collective(1).get()
    assert time.monotonic() - begun < 30
    assert caught.value.traceback.count("in wait_in_collective") == 2
    group.shutdown()


def test_a_stopped_process_is_named():
    """Its state is read by another process of its node."""
    group = start("ray", "Failing", "actor")
    (pid0, _), (pid1, _) = group.pids()
    group._pool.durations = Durations(Limits(2.0))
    os.kill(pid1, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=rf"rank 1 \(process {pid1}\) is stopped: SIGSTOP") as caught:
        group.wait_in_collective(1).get()
    assert caught.value.rank == 1 and "in wait_in_collective" in caught.value.traceback
    group.shutdown()
    assert gone(pid0, 3.0) and gone(pid1, 3.0)


def test_a_queued_call_does_not_time_out():
    """The deadline of a call counts from when the ranks start it, not from when it was submitted."""
    with start("ray", "Echo", "actor") as group:
        group.only_zero()
        group._pool.durations = Durations(Limits(1.0))
        futures = [group.sleep(0.7) for _ in range(3)]
        assert [len(f.get()) for f in reversed(futures)] == [2, 2, 2]


def test_a_worker_that_cannot_be_constructed_frees_its_resources():
    with pytest.raises(WorkerError, match=r"ref.__init__\(\) on rank 1 .*RuntimeError: no such model"):
        RayWorkerGroup(spec("Failing", fail_on_rank=1), TWO, name="ref", timeout=60)
    with RayWorkerGroup(spec("Echo"), ResourcePool("all", (2, 2)), timeout=60, start_timeout=120) as group:
        assert [f["LOCAL_RANK"] for f in group.facts()] == ["0", "1"] * 2


def test_missing_resources_are_reported():
    with pytest.raises(ValueError, match=r"'big' requires 3 nodes with 1 CPU.* within 1 s; it has 2 nodes with 2 CPU"):
        RayWorkerGroup(spec("Echo"), ResourcePool("big", (1, 1, 1)), start_timeout=1)


def test_the_loss_of_a_node_is_named(two_nodes):
    node = two_nodes.add_node(num_cpus=2)
    group = RayWorkerGroup(spec("Echo"), ResourcePool("all", (1, 1, 1)), name="actor", timeout=60, start_timeout=120)
    kept, future = group.rows(wide(9)), group.sleep(60)
    time.sleep(0.5)
    begun = time.monotonic()
    two_nodes.remove_node(node)
    with pytest.raises(WorkerDied, match=r"actor\.sleep\(\) on rank \d .*its node .* is lost"):
        future.get()
    assert time.monotonic() - begun < 10
    with pytest.raises(WorkerDied, match="column 'x' was lost with the process that held it"):
        kept.batch["x"].sum()
    group.shutdown()
