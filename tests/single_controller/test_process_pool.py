"""Worker groups over processes of this host: calls, and errors of a process that raises, dies or hangs."""

import gc
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from tests.programs import run_python
from tests.single_controller.conftest import (
    WIDTH,
    WORKERS,
    check_large_columns,
    check_order,
    check_ranks,
    check_rows,
    spec,
    start,
    wide,
)
from tests.waiting import gone
from verl.config import load_config
from verl.processes import fork_server
from verl.processes.limits import Durations, Limits
from verl.protocol import DataProto
from verl.single_controller import LocalWorkerGroup, WorkerDied, WorkerError, WorkerTimeout, colocate, worker
from verl.single_controller.local import process_pool
from verl.single_controller.worker_group import take_spans
from verl.utils import redaction
from verl.utils.redaction import remember_arguments, secrets_of_settings

SECRETS = "hunter-by-name hunter-of-workers hunter-of-a-judge hunter-by-shell"


def server_pids() -> set[int]:
    return {server.pid for server in fork_server._servers.values()}


@pytest.fixture(scope="module")
def pair():
    """Two roles in two processes; the second role replicates its rows on both."""
    env = {"NCCL_SOCKET_IFNAME": "lo"}
    groups = colocate({"actor": spec("Echo"), "critic": spec("Echo", tp=2)}, n_workers=2, timeout=60, env=env)
    yield groups
    pids = [f["pid"] for f in groups["actor"].facts()]
    groups["actor"].shutdown()
    assert groups["critic"].only_zero() == 0, "the other role still lives there"
    groups["critic"].shutdown()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(WorkerError, match="the group was shut down"):
        groups["critic"].only_zero()


def test_calls_are_recorded_with_process_start_and_end(pair):
    take_spans(0.0)  # those of other tests
    before = time.time()
    pids = [facts["pid"] for facts in pair["actor"].facts()]
    after = time.time()
    pair["critic"].only_zero()
    spans = take_spans(before)
    names = [(f"{socket.gethostname()}:{pid}", rank, "actor", "facts") for rank, pid in enumerate(pids)]
    assert sorted(span[:4] for span in spans if span.method == "facts") == sorted(names)
    assert all(before <= span.start <= span.end <= after for span in spans if span.method == "facts")
    assert {span.role for span in spans} == {"actor", "critic"} and take_spans(0.0) == []


@pytest.mark.parametrize("check", [check_ranks, check_rows, check_order])
def test_two_roles_in_two_processes(check, pair):
    check(pair)


def test_processes_of_pools_are_forked_from_one_server(pair):
    """Their libraries are imported once; the random states and the number of threads are their own."""
    first = pair["actor"].facts()
    with LocalWorkerGroup(spec("Echo"), 2, timeout=60) as group:
        second, call, begun = group.facts(), group.sleep(60), time.monotonic()
    assert time.monotonic() - begun < 3, "processes with a running call are not waited for"
    with pytest.raises(WorkerError, match="the group was shut down during the call"):
        call.get()
    assert {f["server"] for f in first + second} <= server_pids() and len({f["pid"] for f in first + second}) == 4
    assert [len({f["draws"][i] for f in first + second}) for i in range(3)] == [4, 4, 4]
    assert [f["threads"] for f in first] == [int(f["OMP_NUM_THREADS"]) for f in first]
    with colocate({"actor": spec("Echo")}, timeout=60, env={"OMP_NUM_THREADS": "3"})["actor"] as group:
        assert group.facts()[0]["threads"] == 3 and group.facts()[0]["server"] == first[0]["server"]


@pytest.mark.slow
def test_a_killed_server_is_reported(monkeypatch):
    monkeypatch.setattr(fork_server, "_servers", {})  # not the one of the other tests
    group = LocalWorkerGroup(spec("Failing"), 2, name="actor", timeout=60)
    (pid0, _), (pid1, _) = group.pids()
    server = psutil.Process(pid0).ppid()
    os.kill(server, signal.SIGKILL)
    message = rf"process {pid0} was lost: the fork server \(process {server}\) was killed by SIGKILL"
    with pytest.raises(WorkerDied, match=message):
        group.raise_on(5, "")
    assert gone(pid0) and gone(pid1)
    with LocalWorkerGroup(spec("Echo"), 2, timeout=60) as group:
        assert group.facts()[0]["server"] in server_pids() - {server}
    for server in fork_server._servers.values():
        if server.is_alive():
            server.close()


@pytest.mark.slow
def test_fresh_interpreters_where_a_fork_is_refused(pair, monkeypatch, caplog):
    """A module of the server started a thread; the reason is logged."""
    monkeypatch.setattr(fork_server, "_servers", {})
    monkeypatch.setattr(process_pool, "_LIBRARIES", ("tests.utils.starts_a_thread",))
    with colocate({"actor": spec("Echo")}, timeout=60, separate_process=True)["actor"] as group:
        assert group.facts()[0]["server"] is None
    assert "expected one thread after the import of tests.utils.starts_a_thread" in caplog.text
    for server in fork_server._servers.values():
        server.close()


def open_files() -> int:
    """Without the ports that stay reserved."""
    return len(os.listdir("/proc/self/fd")) - len(worker._reserved)


def test_large_columns_go_from_rank_to_rank_and_their_files_are_closed(pair):
    gc.collect()  # what earlier tests left
    before = open_files()
    check_large_columns(pair)
    gc.collect()
    assert open_files() == before


@pytest.mark.slow
def test_columns_outlive_the_processes_that_made_them():
    with LocalWorkerGroup(spec("Echo"), 2, timeout=60) as group:
        out = group.rows(wide(4))
    assert torch.equal(out.batch["x"][:, 0], torch.arange(4))


def test_rows_of_many_results_in_one_call(pair):
    """More memory files than fit into one message."""
    whole = DataProto.concat([pair["actor"].rows(wide(2)) for _ in range(140)])
    assert pair["actor"].total(whole.select(["x"])) == {"x": 0.5 * WIDTH}


def test_calls_from_several_threads_do_not_cross(pair):
    """Each rank gets the calls in the same order; in different orders these collectives would give wrong sums."""

    def reduce_many(value: float) -> list:
        return [pair["actor"].all_reduce(value) for _ in range(20)]

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(reduce_many, [1.0, 10.0, 100.0]))
    assert found == [[[3.0, 3.0]] * 20, [[30.0, 30.0]] * 20, [[300.0, 300.0]] * 20]


def test_unpicklable_arguments_are_reported_before_anything_is_sent(pair):
    with pytest.raises(TypeError, match="cannot pickle"):
        pair["actor"].echo(threading.Lock())
    assert pair["actor"].echo("still there") == ["still there"] * 2


def test_an_exception_on_one_rank_stops_the_others(executor):
    """Rank 1 raises while rank 0 waits: the caller gets the traceback of rank 1, and nothing is left of the group."""
    start(executor, "Failing", "ref").shutdown()  # the fork server, and what is loaded once, stay open
    gc.collect()
    before, is_local = open_files(), executor == "processes"
    group = start(executor, "Failing", "ref")
    (pid0, child), (pid1, _) = group.pids(grandchild=is_local)
    begun = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.raise_on(1, "weights.safetensors")
    assert time.monotonic() - begun < 30
    error = caught.value
    assert (error.role, error.rank, error.method) == ("ref", 1, "raise_on") and error.host
    first, *rest = str(error).splitlines()
    assert first.startswith("ref.raise_on() on rank 1 (") and first.endswith(
        "FileNotFoundError: no file weights.safetensors"
    )
    assert "in read_the_file" in error.traceback and rest[-1] == "FileNotFoundError: no file weights.safetensors"
    with pytest.raises(WorkerError, match=r"its processes were stopped: ref.raise_on\(\) on rank 1") as caught:
        group.pids()
    assert caught.value.__cause__ is error
    if is_local:
        assert gone(pid0) and gone(pid1) and gone(child), "what a worker started ends with it"
        assert open_files() == before
    group.shutdown()
    assert gone(pid0) and gone(pid1, 3.0)


def test_ranks_show_no_secrets_of_the_controller(executor, monkeypatch):
    """Neither host of the ranks has the variables of the controller, nor its command line."""
    monkeypatch.setattr(redaction, "_known", {})
    monkeypatch.setattr(redaction, "_expressions", {})
    monkeypatch.delenv("VERL_INTERPOLATED_VARIABLES", raising=False)
    monkeypatch.setenv("SERVICE_TOKEN", "hunter-by-shell")
    with monkeypatch.context() as patch:
        patch.setenv("JUDGE", "hunter-by-name")
        load_config(None, ["trainer.project_name=${oc.env:JUDGE}", "trainer.worker_env.X=hunter-of-workers"])
        remember_arguments(["reward.reward_kwargs.judge_password=hunter-of-a-judge", "trainer.notes=a-hunter-by-shell"])
        known = secrets_of_settings()
    monkeypatch.delenv("SERVICE_TOKEN")
    monkeypatch.setattr(process_pool, "secrets_of_settings", lambda: known)
    if executor == "ray":
        monkeypatch.setattr("verl.single_controller.ray.actor_pool.secrets_of_settings", lambda: known)
    expected = "${oc.env:JUDGE} <not saved> <not saved> <not saved>"
    with start(executor, "Failing", "ref") as group:
        for text in group.print_and_log(SECRETS):
            assert text.count(expected) == 3 and "hunter" not in text and text.count("printed") == 2
        with pytest.raises(WorkerError) as caught:
            group.raise_on(1, SECRETS)
        assert caught.value.message == f"FileNotFoundError: no file {expected}" and "hunter" not in str(caught.value)


def test_a_killed_process_is_reported_before_the_errors_it_causes(executor):
    """Rank 0 waits for rank 1 in a collective and fails when it is killed; the caller is told of the killed process."""
    group = start(executor, "Failing", "actor")
    (pid0, _), (pid1, _) = group.pids()
    future = group.wait_in_collective(1)
    with pytest.raises(TimeoutError):
        future.get(timeout=1.0)
    message = {"processes": f"process {pid1} was killed by SIGKILL", "ray": "its process died"}[executor]
    begun = time.monotonic()
    os.kill(pid1, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"actor\.wait_in_collective\(\) on rank 1 .*{message}") as caught:
        future.get()
    assert caught.value.rank == 1, "the others are notes"
    assert not any(f"process {pid1} was killed" in note for note in getattr(caught.value, "__notes__", []))
    assert time.monotonic() - begun < 30
    assert executor == "ray" or gone(pid0)
    group.shutdown()
    assert gone(pid0)


def test_a_hang_ends_with_the_stacks_of_all_ranks():
    """Also of the rank that keeps Python's lock in C code, where no Python thread could look."""
    group = start("processes", "Failing", "actor")
    (pid0, _), (pid1, _) = group.pids()
    group._pool.durations = Durations(Limits(0.5))
    begun = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"no reply after 0.5 s from ranks \[1\] \(replied: \[0\]; ") as caught:
        group.hang_with_the_lock(1)
    assert time.monotonic() - begun < 30
    rank0, rank1 = caught.value.traceback.split("--- rank 1")
    assert "in hang_with_the_lock" in rank1 and "in serve" in rank0 and gone(pid0) and gone(pid1)


@pytest.mark.slow
def test_one_worker_with_a_device_is_a_process_too(monkeypatch):
    """It sees the chosen device alone, which this process could not arrange for itself any more."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(WorkerError, match=r"ref.__init__\(\) on rank 0 .*RuntimeError: no such model, devices 6"):
        LocalWorkerGroup(spec("Failing", fail_on_rank=0), name="ref", devices=[2], timeout=60)


SCRIPT = """
import os, signal, sys
from verl.single_controller import LocalWorkerGroup, WorkerSpec
group = LocalWorkerGroup(WorkerSpec((sys.argv[1], "Failing")), devices=[0])   # needs no `if __name__ == "__main__"`
print(*group.pids(grandchild=True)[0], flush=True)
group.submit("raise_on", 5, "")                                               # it is busy from here on
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", pytest.param("ends", marks=pytest.mark.slow)])
def test_no_process_outlives_the_controller(tmp_path, how):
    """Neither the worker nor what it started."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python(str(tmp_path / "script.py"), WORKERS, how, cwd=tmp_path)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_an_open_pool_does_not_keep_the_program_alive(pair):
    """As `ends` above, without a program: Python waits for all threads but daemons before it calls `atexit`."""
    monitors = [thread for thread in threading.enumerate() if thread.name == "worker monitor"]
    assert monitors and all(thread.daemon for thread in monitors)


def test_wrong_sizes_raise():
    with pytest.raises(ValueError, match="n_workers: expected at least 1, found 0"):
        LocalWorkerGroup(spec("Echo"), 0)
    with pytest.raises(ValueError, match=r"devices: expected one for each of the 2 workers, found \[0\]"):
        LocalWorkerGroup(spec("Echo"), 2, devices=[0])


@pytest.mark.slow
def test_what_workers_log_is_seen_once(capfd):
    with LocalWorkerGroup(spec("Talker"), 2, timeout=60):
        pass
    shown = capfd.readouterr().out
    assert "rank 0 has no value head" in shown and "rank 1 has no value head" not in shown
    assert "WARNING rank 0 is short of memory" in shown and "WARNING rank 1 is short of memory" in shown
