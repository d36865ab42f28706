"""Ranks that do not reply: which one is named, and when."""

import os
import signal
import threading

import psutil
import pytest

from tests.single_controller.conftest import spec
from verl.dataflow import running
from verl.processes.limits import Limits
from verl.single_controller import LocalWorkerGroup, WorkerTimeout
from verl.single_controller.worker_group import RankState, timeout_error


def group_of(name: str, limits: Limits, n: int = 2) -> LocalWorkerGroup:
    return LocalWorkerGroup(spec(name), n, name="actor", timeout=limits)


def test_a_stopped_rank_is_named():
    """It is the one that the others wait for, whatever their state."""
    with group_of("Failing", Limits(timeout=2)) as group:
        (_, _), (pid, _) = group.pids()
        os.kill(pid, signal.SIGSTOP)
        with running("update_actor"), pytest.raises(WorkerTimeout) as error:
            group.wait_in_collective(1).get()
    assert error.value.rank == 1
    first_line = str(error.value).splitlines()[0]
    assert f"rank 1 (process {pid}) is stopped: SIGSTOP (`kill -CONT {pid}` continues it)" in first_line
    assert "in operator 'update_actor'" in first_line
    assert "in wait_in_collective" in error.value.traceback.split("--- rank 1")[0], "the stack of the other one"


def test_a_rank_that_continues_is_not_lost():
    with group_of("Echo", Limits(timeout=3600, factor=10, minimum=3)) as group:
        pid = group.facts()[1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        assert len(group.sleep(0.1).get()) == 2


@pytest.mark.slow
def test_the_limit_follows_the_durations_of_the_operator():
    with group_of("Echo", Limits(timeout=3600, factor=10, minimum=0.5)) as group:
        for _ in range(3):
            with running("gen"):
                group.sleep(0.2).get()
        with running("validation: gen"):
            group.sleep(4.0).get()  # another operator: it has not run yet
        group.sleep(4.0).get()  # not in an operator
        with running("gen"), pytest.raises(WorkerTimeout, match=r"10 x the median of 0\.\d+ s, at least 0.5 s"):
            group.sleep(60.0).get()


@pytest.mark.slow
def test_a_stopped_rank_is_the_cause_of_an_error_in_a_collective():
    """Rank 1 gives up after the timeout of its process group, before the controller does."""
    with group_of("Failing", Limits(timeout=60)) as group:
        (pid, _), _ = group.pids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerTimeout) as error:
            group.time_out_in_collective(0, 2.0)
    assert error.value.rank == 0
    first_line = str(error.value).splitlines()[0]
    assert f"rank 0 (process {pid}) is stopped: SIGSTOP" in first_line and "rank 1 raised" in first_line
    assert "in serve" in error.value.traceback.split("--- rank 1")[1], "the stack of the other one"


def test_loading_has_a_limit_of_its_own():
    limits = Limits(timeout=0.1, start=60)
    with LocalWorkerGroup(spec("Slow", seconds=0.3), 2, timeout=limits) as group:
        assert group.ready() == [True, True]
    with pytest.raises(WorkerTimeout, match=r"__init__\(\) .*no reply after 0.5 s.*trainer.start_timeout"):
        LocalWorkerGroup(spec("Slow", seconds=60.0), 2, timeout=Limits(timeout=60, start=0.5))


COLLECTIVE = """
Current thread 0x1 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/x/engine.py", line 10 in update
  File "/x/verl/single_controller/local/worker_main.py", line 70 in _run
"""
ELSEWHERE = """
Thread 0x2 (most recent call first):
  File "/x/threading.py", line 1 in wait

Current thread 0x1 (most recent call first):
  File "/x/my_loss.py", line 7 in spin
  File "/x/verl/single_controller/local/worker_main.py", line 70 in _run
"""


def state(rank: int, status: str | None = psutil.STATUS_SLEEPING) -> RankState:
    return RankState(rank, 100 + rank, "host", status)


@pytest.mark.parametrize(
    ("states", "stacks", "culprit", "words"),
    [
        ([state(0), state(1, psutil.STATUS_STOPPED)], {}, 1, "is stopped: SIGSTOP"),
        ([state(0, psutil.STATUS_ZOMBIE), state(1)], {}, 0, "has ended and is a zombie"),
        ([state(0), state(1, psutil.STATUS_DISK_SLEEP)], {}, 1, "waits for a disk, a network file system or a device"),
        ([state(0), state(1, None)], {}, 1, "unknown state, since its host does not respond"),
        ([state(0), state(1)], {0: COLLECTIVE, 1: ELSEWHERE}, 1, "in spin (/x/my_loss.py:7) while ranks [0] wait"),
        ([state(0), state(1)], {0: ELSEWHERE, 1: COLLECTIVE}, 0, "in spin (/x/my_loss.py:7) while ranks [1] wait"),
        ([state(0), state(1)], {0: COLLECTIVE, 1: COLLECTIVE}, 0, "ranks [0, 1] wait in a collective operation"),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_wait_for(states, stacks, culprit, words):
    error = timeout_error(states, stacks, "actor", "update", "no reply after 120 s")
    assert error.rank == culprit and words in error.message and "no reply after 120 s" in error.message
    assert all(f"--- rank {s.rank}" in error.traceback for s in states)
