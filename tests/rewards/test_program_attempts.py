"""No program in a response reaches processes, files, networks or the kernel: `attempts` in each mode of isolation."""

import ctypes
import functools
import json
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.rewards.attempts import ATTEMPTS, PROGRAM
from tests.rewards.modes import MODES, each_mode
from verl.processes.isolation import mode as mode_module
from verl.processes.isolation.program import Limits, run_program

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux isolates programs"),
    pytest.mark.skipif("seccomp" not in MODES["landlock"].describe(), reason="needs seccomp and libseccomp2"),
]


def number(name: str) -> int:
    return ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name(name.encode())


def describe_process(pid: int) -> tuple:
    """What a program could have changed of a process."""
    return (
        [resource.prlimit(pid, limit) for limit in range(16)],
        os.getpriority(os.PRIO_PROCESS, pid),
        os.sched_getaffinity(pid),
        os.sched_getscheduler(pid),
        Path(f"/proc/{pid}/oom_score_adj").read_text(),
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "SR",
    )


def describe_file(path: Path) -> tuple:
    info = path.lstat()
    attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return (info.st_mode, info.st_uid, info.st_gid, info.st_nlink, info.st_mtime_ns, info.st_size, attributes)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A process, files and servers of this user; nothing of it changes."""
    folder = tmp_path_factory.mktemp("of the user")
    (folder / "file").write_text("SECRET")
    (folder / "empty").mkdir()
    files = [folder, folder / "file", folder / "empty", Path(sys.executable), Path(sys.executable).resolve()]
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0) as victim,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(folder / "socket"))
        abstract.bind(f"\0verl-{os.getpid()}")
        for server in (tcp, udp, unix, abstract):
            server.setblocking(False)
            if server.type == socket.SOCK_STREAM:
                server.listen()
        names = {"PORT": tcp.getsockname()[1], "UDP": udp.getsockname()[1], "UNIX": str(folder / "socket")}
        names |= {"ABSTRACT": f"verl-{os.getpid()}", "FILE": str(folder / "file"), "FOLDER": str(folder)}
        names |= {"VICTIM": victim.pid, "TRAINER": os.getpid(), "PYTHON": sys.executable}
        before = [describe_process(victim.pid), describe_process(os.getpid()), [*map(describe_file, files)]]
        yield names
        assert [describe_process(victim.pid), describe_process(os.getpid()), [*map(describe_file, files)]] == before
        assert (folder / "file").read_text() == "SECRET" and sorted(os.listdir(folder)) == ["empty", "file", "socket"]
        for server in (tcp, udp, unix, abstract):
            with pytest.raises(BlockingIOError):
                server.accept() if server.type == socket.SOCK_STREAM else server.recv(1)
        victim.communicate(b"\n")
        assert victim.returncode == 0


@pytest.fixture(scope="module")
def results(host):
    os.environ["VERL_TEST_SECRET"] = "SECRET"
    numbers = {name: number(name) for code in ATTEMPTS.values() for name in re.findall(r"call\('(\w+)'", code)}
    numbers |= {"prctl": number("prctl")}
    stdin = json.dumps([host, numbers, ATTEMPTS])

    @functools.cache
    def run(mode: str) -> dict[str, str]:
        finished = run_program(PROGRAM, limits=Limits(60.0), stdin=stdin, mode=MODES[mode])
        assert finished.failure is None, finished
        return json.loads(finished.stdout)

    yield run
    del os.environ["VERL_TEST_SECRET"]


@each_mode
@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_attempt_succeeds(name, mode, results):
    assert results(mode)[name] != "reached"


@each_mode
def test_the_attempts_are_not_all_errors_of_the_test(mode, results):
    """They fail by permission, by a missing file or process, or without an effect, not by a mistake in their code."""
    expected = r"(PermissionError|OSError|FileNotFoundError|ProcessLookupError|AssertionError|BlockingIOError|gaierror"
    expected += r"|NotImplementedError|ValueError\('not allowed to raise|killed|NotADirectoryError|FileExistsError)"
    assert {name: text for name, text in results(mode).items() if not re.match(expected, text)} == {}


def test_every_allowed_call_exists():
    """A name with a mistake would refuse a call that programs need."""
    table = yaml.safe_load(mode_module._CALLS.read_text())
    names = " ".join([*table["allowed"].values(), table["signals_to_others"], table["attributes"]]).split()
    unknown = -1  # of libseccomp; other negative numbers are calls of other architectures
    assert [name for name in [*names, *table["conditions"]] if number(name) == unknown] == []


def test_they_succeed_without_isolation(host, tmp_path):
    """A sample of the attempts outside of the isolation: the test can fail."""
    names = ["file: read", "file: list", "process: signal 0", "network: udp", "kernel: memfd", "process: /proc/mem"]
    stdin = json.dumps([host | {"UDP": 9}, {"prctl": number("prctl")}, {name: ATTEMPTS[name] for name in names}])
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert json.loads(output) == dict.fromkeys(names, "reached")
