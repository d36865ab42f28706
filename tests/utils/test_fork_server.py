"""Processes forked from a server: what they have in common with fresh interpreters, how they end, and who ends them."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

import verl
from tests.waiting import gone, wait_until
from verl.processes import fork_server
from verl.processes.child import PythonProcess, describe_exit
from verl.processes.fork_server import ForkServer, ForkServerError, server_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
EVALUATOR = "tests.utils.evaluator"
ENV = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "OF_THE_TEST": "1"}


@contextmanager
def evaluator(start, **options):
    """The connection to an evaluator, and its process."""
    ours, theirs = Pipe()
    with theirs:
        process = start(EVALUATOR, [theirs.fileno()], **options)
    yield ours, process
    ours.close()
    process.kill()
    process.close()


def ask(connection, expression: str):
    connection.send(expression)
    assert connection.poll(20), f"no reply to {expression}"
    return connection.recv()


@pytest.fixture(scope="module")
def server():
    return server_for(ENV)


@pytest.mark.parametrize("reports", [False, True])
def test_a_fork_has_what_a_fresh_interpreter_has(server, reports, tmp_path, monkeypatch):
    """Environment, folder, arguments, descriptors and so on; folder and limit have changed since the server started."""
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    assert server_for(ENV) is server
    env = {**ENV, "RANK": "1", "OMP_NUM_THREADS": "3"}
    with evaluator(PythonProcess, env=env, reports=reports) as (connection, _):
        fresh = ask(connection, "facts()")
    with evaluator(server.start, env=env, reports=reports) as (connection, process):
        forked = ask(connection, "facts()")
        assert ask(connection, "os.getpid()") == process.pid and ask(connection, "os.getppid()") == server.pid
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert forked == fresh and forked["open files"] == (soft - 1, hard)
    assert forked["folder"] == str(tmp_path) and forked["environment"].items() >= env.items()


def test_forks_share_the_server_and_not_the_random_states(server):
    assert server_for({**ENV, "RANK": "1", "VERL_LOGGING_LEVEL": "DEBUG", "PYTEST_CURRENT_TEST": "x"}) is server
    draws = set()
    for _ in range(2):
        with evaluator(server.start, env=ENV, preload=["random"]) as (connection, _):
            assert ask(connection, "os.getppid()") == server.pid
            draws.add(ask(connection, "sys.modules['random'].random()"))
    assert len({*draws, random.random()}) == 3


@pytest.mark.parametrize(
    "change", [{"OF_THE_TEST": "2"}, {"HF_HOME": "/models"}, {"CUDA_VISIBLE_DEVICES": ""}, {"PYTHONHASHSEED": "7"}]
)
def test_another_environment_has_another_server(server, change, monkeypatch):
    monkeypatch.setattr(fork_server, "_servers", dict(fork_server._servers))
    other = server_for(ENV | change)
    assert other is not server and other is server_for(ENV | change) and server is server_for(ENV)
    other.close()


def test_the_package_reads_no_variable_when_it_is_imported():
    """So that processes of one server may differ in VERL_ variables."""
    files = [*Path(verl.__file__).parent.rglob("*.py")]
    reads = re.compile(r"^(?!def |class |async def )\S.*(os\.environ|getenv)", re.MULTILINE)
    assert len(files) > 150 and [path for path in files if reads.search(path.read_text())] == []


def test_a_closed_output_is_refused():
    kept = os.dup(1)
    os.close(1)
    try:
        with pytest.raises(ForkServerError, match="file descriptor 1 is closed"):
            server_for(ENV)
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_idle_servers_are_ended(monkeypatch):
    monkeypatch.setattr(fork_server, "_servers", {})
    monkeypatch.setattr(fork_server, "_HANDED_OUT_SECONDS", 0.0)
    servers = [server_for(ENV | {"NUMBER": str(n)}) for n in range(2)]
    with evaluator(servers[0].start, env=ENV):
        servers += [server_for(ENV | {"NUMBER": str(n)}) for n in range(2, 6)]
        assert [server.is_alive() for server in servers] == [True, False, True, True, True, True]
        assert {*fork_server._servers.values()} == {*servers} - {servers[1]}
    for server in servers:
        if server.is_alive():
            server.close()


def test_servers_that_start_a_process_are_not_idle(tmp_path, monkeypatch):
    """While their first request is in flight, and while it is about to be sent."""
    (tmp_path / "waits_for_a_file.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_server, "_servers", {})
    monkeypatch.setattr(fork_server, "_MAX_IDLE_SERVERS", 0)
    first, second = (server_for(ENV | {"NUMBER": str(n)}) for n in range(2))
    assert first.is_alive(), "just handed out"
    monkeypatch.setattr(fork_server, "_HANDED_OUT_SECONDS", 0.0)
    ours, theirs = Pipe()
    with ThreadPoolExecutor(1) as executor:
        started = executor.submit(first.start, EVALUATOR, [theirs.fileno()], ENV, preload=["waits_for_a_file"])
        wait_until(lambda: not first.is_idle())
        assert server_for(ENV | {"NUMBER": "0"}) is first and not second.is_alive()
        third = server_for(ENV | {"NUMBER": "2"})
        (tmp_path / "go").touch()
        process = started.result(20)
    assert first.is_alive() and not first.is_idle()
    process.kill()
    process.close()
    ours.close()
    theirs.close()
    assert first.is_idle()
    first.close()
    third.close()


ENDS = [
    ("sys.exit(3)", 3, "exited with status 3"),
    ("1 / 0", 1, "exited with status 1"),
    ("os.abort()", -signal.SIGABRT, "was killed by SIGABRT"),
    ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "was killed by SIGTERM"),
    ("os.close(int(sys.argv[1])) or atexit.register(print, 'at exit')", 1, "exited with status 1"),
]


@pytest.mark.parametrize("expression, status, message", ENDS)
def test_exit_statuses(server, expression, status, message, capfd):
    with evaluator(server.start, env=ENV) as (connection, process):
        assert process.poll() is None and process.wait(0.05) is None and process.exit_message() is None
        connection.send(expression)
        assert process.wait(20) == status == process.poll()
        assert process.exit_message() == f"process {process.pid} {message}"
        assert not psutil.pid_exists(process.pid), "a zombie"
    out, err = capfd.readouterr()
    assert ("at exit" in out) == ("atexit" in expression) and ("ZeroDivisionError" in err) == (expression == "1 / 0")


@pytest.mark.parametrize(
    "status, description",
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-11, "was killed by SIGSEGV"),
        (-9, "was killed by SIGKILL (if no user or scheduler did it, the machine ran out of memory: see `dmesg`)"),
        (-70, "was killed by signal 70"),
    ],
)
def test_exits_are_described(status, description):
    assert describe_exit(status) == description


def test_output_goes_where_that_of_the_parent_goes_now(server, capfd):
    with evaluator(server.start, env=ENV) as (connection, process):
        connection.close()
        assert process.wait(20) == 0
    assert capfd.readouterr().out == "done\n"


def test_kill_ends_what_a_process_has_started(server):
    with evaluator(server.start, env=ENV) as (connection, process):
        child = ask(connection, "subprocess.Popen(['sleep', '1000']).pid")
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
        assert gone(child, 5.0)


def test_a_dead_server_is_reported_and_replaced(monkeypatch):
    monkeypatch.setattr(fork_server, "_servers", {})
    server = server_for(ENV)
    with evaluator(server.start, env=ENV) as (connection, process):
        os.kill(server.pid, signal.SIGKILL)
        found = f"the fork server (process {server.pid}) was killed by SIGKILL"
        with pytest.raises(ChildProcessError, match=f"process {process.pid} was lost: the fork server"):
            process.wait(20)
        assert process.exit_message().startswith(f"process {process.pid} was lost: {found}")
        assert ask(connection, "1 + 1") == 2, "the pool kills it"
    with pytest.raises(ForkServerError) as error:
        server.start(EVALUATOR, [], ENV)
    assert str(error.value).startswith(found)
    other = server_for(ENV)
    assert other is not server and other.is_alive()
    other.close()


def refusal(server, module: str) -> str:
    with pytest.raises(ForkServerError) as error:
        server.start(EVALUATOR, [], ENV, preload=[module])
    return str(error.value).removeprefix(f"the fork server (process {server.pid}): ")


def test_a_server_that_cannot_fork_says_why():
    """A module that cannot be imported refuses its own request only; a thread refuses every later one."""
    server = ForkServer(ENV)
    for _ in range(2):
        assert refusal(server, "no_such_module") == "ModuleNotFoundError: No module named 'no_such_module'"
    with evaluator(server.start, env=ENV) as (connection, _):
        assert ask(connection, "os.getppid()") == server.pid
    for module in ("tests.utils.starts_a_thread", "random"):
        found = refusal(server, module)
        assert found.startswith("RuntimeError: expected one thread after the import of tests.utils.starts_a_thread")
        assert found.endswith("found 2")
    server.close()


def test_a_start_can_be_cancelled(tmp_path, monkeypatch):
    """While the server imports a module that takes long."""
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(1000)")
    monkeypatch.syspath_prepend(tmp_path)
    server, start = ForkServer(ENV), time.monotonic()
    with pytest.raises(InterruptedError, match="cancelled"):
        server.start(EVALUATOR, [], ENV, preload=["slow_to_import"], cancelled=lambda: time.monotonic() - start > 0.2)
    assert not server.is_alive()


PARENT = f"""
import os, signal
from verl.processes.fork_server import server_for
server = server_for(os.environ)
reader, writer = os.pipe()
process = server.start("{EVALUATOR}", [reader, writer], os.environ)  # it reads no end of file
print(server.pid, process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_server_and_processes_end_with_the_parent():
    env = {**ENV, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", PARENT], env=env, stdout=subprocess.PIPE, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2 and all(gone(pid, 5.0) for pid in pids)


DYING_PARENT = f"""
import os, signal, threading
from verl.processes.fork_server import server_for
server = server_for(os.environ)
print(server.pid, flush=True)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
server.start("{EVALUATOR}", os.pipe(), os.environ, preload=["slow_to_import"])
"""


def test_a_server_ends_quietly_if_the_parent_has_ended_during_an_import(tmp_path):
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(1.0)")
    env = {**ENV, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", DYING_PARENT], env=env, stdout=subprocess.PIPE, stderr=log, text=True, timeout=60
        )
    (pid,) = map(int, done.stdout.split())
    assert done.returncode == -signal.SIGKILL and gone(pid, 5.0)
    assert (tmp_path / "log").read_text() == ""
