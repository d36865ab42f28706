"""Programs in responses have no network, no files of the user, and one memory limit: real programs that try."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from verl.rewards.sandbox import program_boot, programs
from verl.rewards.sandbox.pool import Limits
from verl.rewards.sandbox.program_boot import can_filter_calls, exceeded_file_limit, landlock_abi
from verl.rewards.sandbox.programs import has_shared_memory, run_program

ON_LINUX = sys.platform == "linux"
needs_landlock = pytest.mark.skipif(not ON_LINUX or landlock_abi() < 1, reason="no Landlock here")
needs_seccomp = pytest.mark.skipif(not ON_LINUX or not can_filter_calls(), reason="no seccomp here")

needs_shared_memory = pytest.mark.skipif(not has_shared_memory(), reason="no private /dev/shm here")


def run(code: str, memory: int = 1 << 30, seconds: float = 60.0):
    limits = Limits(seconds, cpu_seconds=seconds, memory_bytes=memory, output_bytes=1 << 20)
    return run_program(code, limits=limits)


def refused(code: str) -> bool:
    """Whether a program ends with EPERM or EACCES, or with EXDEV: links and renames across the border."""
    finished = run(code)
    assert finished.failure == "ended with exit status 1", finished
    return "PermissionError" in finished.stderr or "[Errno 18]" in finished.stderr


@needs_seccomp
@pytest.mark.parametrize("kind", ["tcp", "udp", "unix"])
def test_no_program_reaches_a_server(kind, tmp_path):
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "socket") if kind == "unix" else ("127.0.0.1", 0))
        if kind != "udp":
            server.listen()
        server.settimeout(0.2)
        send = f"s = socket.socket({family}, {server.type}); s.connect({server.getsockname()!r}); s.send(b'x')"
        assert refused(f"import socket\n{send}")
        with pytest.raises(TimeoutError):
            server.recv(1) if kind == "udp" else server.accept()


@needs_seccomp
def test_a_system_call_by_its_number_is_refused_too():
    names = "41, 425, 319" if os.uname().machine == "x86_64" else "198, 425, 279"
    code = f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint([c.syscall(n, 2, 1, 0) for n in ({names})])"
    assert run(f"{code}\nprint(ctypes.get_errno())").stdout == "[-1, -1, -1]\n1\n"


@needs_landlock
@pytest.mark.parametrize(
    "act",
    [
        "open({file!r}).read()",
        "os.listdir({folder!r})",
        "open('/proc/{pid}/cmdline').read()",
        "open({file!r}, 'a').write('x')",
        "open({folder!r} + '/new', 'w')",
        "os.remove({file!r})",
        "os.link({file!r}, 'link')",
        "os.symlink({file!r}, 'link'); open('link').read()",
        "os.rename({file!r}, 'mine')",
        *(f"os.open('/proc/self/fd/{stream}', os.O_WRONLY)" for stream in range(3)),
    ],
)
def test_no_program_reads_or_changes_what_is_not_its_own(act, tmp_path):
    """The files of the user, the command lines of other processes, and its standard streams."""
    (tmp_path / "file").write_text("of the user")
    assert refused("import os; " + act.format(file=str(tmp_path / "file"), folder=str(tmp_path), pid=os.getpid()))
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "of the user"


USES_OF_MULTIPROCESSING = {
    "pool": "with m.Pool(2) as pool: print(sum(pool.map(square, range(3))))",
    "executor": "with concurrent.futures.ProcessPoolExecutor(2) as pool: print(sum(pool.map(square, range(3))))",
    "a pool of new interpreters": "with m.get_context('spawn').Pool(1) as pool: print(pool.apply(square, (2,)) + 1)",
    "queue, lock and value": """
def add(queue, lock, value):
    with lock:
        value.value += 1
        queue.put(value.value)
queue, lock, value = m.Queue(), m.Lock(), m.Value("i", 0)
processes = [m.Process(target=add, args=(queue, lock, value)) for _ in range(2)]
[p.start() for p in processes], [p.join() for p in processes]
print(queue.get() + queue.get() + value.value)
""",
    "shared memory": """
block = shared_memory.SharedMemory(create=True, size=4 << 20)  # more than the limit of the output
if os.fork() == 0:
    same = shared_memory.SharedMemory(block.name)
    same.buf[0] = 5
    os._exit(0)
os.wait()
print(block.buf[0])
block.close(), block.unlink()
""",
}


@needs_shared_memory
@pytest.mark.parametrize("use", USES_OF_MULTIPROCESSING)
def test_programs_can_use_multiprocessing(use):
    program = "import concurrent.futures, os, multiprocessing as m\nfrom multiprocessing import shared_memory\n"
    program += "def square(x):\n    return x * x\n"
    body = USES_OF_MULTIPROCESSING[use].strip().replace("\n", "\n    ")
    finished = run(f"{program}if __name__ == '__main__':\n    {body}\n")
    assert finished.failure is None and finished.stdout == "5\n", finished


@needs_shared_memory
def test_shared_memory_is_private_and_counts():
    """What is mapped counts as memory of its process, too."""
    assert run("import os; open('/dev/shm/left_by_a_program', 'w'); print(os.listdir('/dev/shm'))").failure is None
    assert not os.path.exists("/dev/shm/left_by_a_program")
    fill = "import time\nfor i in range(6): open(f'/dev/shm/{i}', 'wb').write(bytes(10 << 20))\n"
    assert run(fill + "print('written')", memory=200 << 20).stdout == "written\n"
    assert "No space left" in run(fill, memory=100 << 20).stderr
    more = run(fill + "block = bytes(b'x') * (50 << 20); time.sleep(30)", memory=120 << 20)
    assert more.failure == "ended by SIGKILL" and "more than 120 MiB together" in more.stderr


@needs_shared_memory
def test_output_is_limited_although_shared_memory_is_larger():
    for wait in ("", "import time; time.sleep(30)"):
        finished = run(f"import sys\nprint('x' * (3 << 20)); sys.stdout.flush()\n{wait}")
        assert finished.failure == "ended by SIGKILL" and "printed more than 1048576 bytes" in finished.stderr
        assert len(finished.stdout) == 1 << 20


@pytest.mark.parametrize("mounts", [False, pytest.param(True, marks=needs_shared_memory)])
def test_standard_input_cannot_be_written(mounts, monkeypatch):
    monkeypatch.setattr(programs, "has_shared_memory", lambda: mounts)
    code = "import os\ntry:\n    os.write(0, b'x')\nexcept OSError as error:\n    print(error.errno, input())\n"
    limits = Limits(60.0, memory_bytes=1 << 30)
    assert run_program(code, limits=limits, stdin="given\n").stdout == "9 given\n"  # EBADF


@needs_seccomp
@pytest.mark.parametrize("stream", [1, 2])
def test_no_space_of_the_disk_is_reserved_for_an_output(stream):
    """It does not count in the size of the file: the second argument keeps the size."""
    number = 285 if os.uname().machine == "x86_64" else 47
    code = (
        f"import ctypes, os; c = ctypes.CDLL(None); c.syscall({number}, {stream}, 1, *map(ctypes.c_long, (0, 1 << 26)))"
    )
    assert run(f"{code}; print(os.fstat({stream}).st_blocks)").stdout == "0\n"
    assert refused(f"import os; os.posix_fallocate({stream}, 0, 1 << 20)")


def disk_use(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


@needs_shared_memory
@pytest.mark.parametrize("held", ["", "held.append(file)", "held.append(file); os.remove(str(i))"])
def test_files_of_a_program_are_in_memory_and_limited_together(held, tmp_path, monkeypatch):
    """Also those that are deleted and still open."""
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))
    used = []
    monkeypatch.setattr(programs, "_remove", lambda folder: used.append(disk_use(tmp_path)))
    fill = (
        "import os\nheld = []\n"
        f"for i in range(60):\n    file = open(str(i), 'wb', 0); file.write(bytes(1 << 20)); {held or 'file.close()'}\n"
    )
    failed = run(fill, memory=100 << 20)
    assert failed.failure == "ended with exit status 1" and "No space left on device" in failed.stderr
    assert run(fill, memory=200 << 20).failure is None
    assert max(used) < 1 << 20  # programs and streams
    many = run("for i in range(5000): open(str(i), 'w').close()")
    assert many.failure == "ended with exit status 1" and "No space left on device" in many.stderr


@pytest.mark.parametrize(
    "act, said",
    [
        ("[open(str(i), 'wb').write(bytes(1 << 20)) for i in range(60)]", "wrote more than 50 MiB to files"),
        ("[open(str(i), 'w').close() for i in range(5000)]", "made more than 4096 files"),
        ("[os.mkdir(str(i)) for i in range(5000)]", "made more than 4096 files"),
        ("[(os.mkdir('d' * 99), os.chdir('d' * 99)) for _ in range(50)]", "made folders that cannot be measured"),
    ],
)
def test_without_mounts_the_files_of_a_program_are_measured(act, said, monkeypatch):
    monkeypatch.setattr(programs, "has_shared_memory", lambda: False)
    finished = run(f"import os, time\n{act}\ntime.sleep(60)", memory=100 << 20)
    assert finished.failure == "ended by SIGKILL" and said in finished.stderr
    large = run("open('file', 'wb').write(bytes(2 << 20))")
    assert large.failure == "ended with exit status 1" and "File too large" in large.stderr


def test_files_that_fit_are_measured_and_allowed(tmp_path):
    for i in range(40):
        (tmp_path / str(i)).write_bytes(os.urandom(1 << 20))
    assert exceeded_file_limit(str(tmp_path), 100 << 20) is None
    assert exceeded_file_limit(str(tmp_path), -1) is None
    assert exceeded_file_limit(str(tmp_path), 78 << 20) == "wrote more than 39 MiB to files"


@pytest.mark.skipif(not ON_LINUX, reason="/proc")
@pytest.mark.parametrize("name", [b"\x0bVmSwap: -99999", b"\x85VmSwap: -99999", b"\xff"])
def test_the_name_of_a_process_does_not_change_its_memory(name):
    """15 bytes that a process chooses are in the file that is read without root."""
    rename = f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); print('x', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert program_boot._kilobytes(process.pid, "status", ("RssAnon:", "RssShmem:", "VmSwap:")) > 1000
        process.stdin.write(b"\n")


@pytest.mark.skipif(not ON_LINUX, reason="/proc")
def test_a_fork_bomb_is_ended():
    bomb = "import os, time\nfor _ in range(9): os.fork()\ntime.sleep(600)"  # 512 processes, if none ends them
    finished = run(bomb, memory=4 << 30)
    assert finished.failure == "ended by SIGKILL" and "were more than 256 processes" in finished.stderr


@needs_seccomp
def test_without_mounts_there_is_a_warning_and_programs_run_as_before(monkeypatch, caplog):
    """The probe runs with a filter of its own, which refuses `unshare`, as in most containers."""
    boot = Path(programs.__file__).with_name("program_boot.py")
    code = (
        f"import ctypes, runpy, sys; names = runpy.run_path({str(boot)!r}); machine = names['platform'].machine()\n"
        "number = {'x86_64': 272, 'aarch64': 97}[machine]\n"
        "libc = ctypes.CDLL(None); libc.prctl(38, 1, 0, 0, 0)\n"
        "names['refuse_calls'](libc, names['REFUSED_CALLS'][machine][0], (number,)); names['main']()\n"
    )
    real = subprocess.run
    monkeypatch.setattr(programs.subprocess, "run", lambda _, **kw: real([sys.executable, "-I", "-c", code], **kw))
    for cached in (programs.has_shared_memory, programs.warn_about_missing_isolation):
        cached.cache_clear()
        monkeypatch.setattr(programs, cached.__name__, functools.cache(cached.__wrapped__))
    assert not programs.has_shared_memory()
    assert run("print(1)").stdout == "1\n"
    if landlock_abi() > 0:
        assert refused("import multiprocessing; multiprocessing.Lock()")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "cannot use locks, queues, pools and shared memory of multiprocessing" in said


def test_what_solutions_need_is_allowed():
    finished = run(
        "import os, random, shutil, socket, subprocess, tempfile\n"
        "import numpy as np\n"
        "a, b = socket.socketpair(); a.send(b'pair'); print(b.recv(4).decode())\n"
        "with tempfile.NamedTemporaryFile('w+') as f: f.write('file'); f.seek(0); print(f.read())\n"
        "os.makedirs('d/e'); open('x', 'w').write('moved'); os.rename('x', 'd/e/x'); print(open('d/e/x').read())\n"
        "shutil.rmtree('d')\n"
        "print(subprocess.run(['sh', '-c', 'echo child'], capture_output=True, text=True, check=True).stdout, end='')\n"
        "print(int(np.arange(4).sum()), len(os.urandom(4)), open('/dev/null').read() == '')\n"
    )
    assert finished.failure is None and finished.stdout == "pair\nfile\nmoved\nchild\n6 4 True\n"


ALLOCATE = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = b"x" * ({megabytes} << 20)
        time.sleep({seconds})
        os._exit(0)
for _ in range(8):
    os.wait()
print("all have ended")
"""


@pytest.mark.skipif(not ON_LINUX, reason="/proc")
def test_eight_children_share_one_memory_limit():
    finished = run(ALLOCATE.format(megabytes=40, seconds=600), memory=200 << 20)  # 320 MiB in all, 40 each
    assert finished.failure == "ended by SIGKILL"
    assert "used more than 200 MiB together" in finished.stderr
    assert run(ALLOCATE.format(megabytes=10, seconds=1), memory=200 << 20).stdout == "all have ended\n"


@pytest.mark.skipif(not ON_LINUX, reason="/proc")
def test_pages_shared_with_children_count_once():
    shared = "block = b'x' * (60 << 20)\n" + ALLOCATE.format(megabytes=0, seconds=1)
    finished = run(shared, memory=200 << 20)  # 8 x 60 MiB, if each of them counted
    if os.getuid():  # PSS of these processes is for root only; without it each counts
        pytest.skip("needs root")
    assert finished.stdout == "all have ended\n", finished


def test_what_the_kernel_cannot_prevent_is_logged_once(monkeypatch, caplog):
    """The kernel of the test has it all, so the versions are replaced."""
    monkeypatch.setattr(programs, "landlock_abi", lambda: -1)
    monkeypatch.setattr(programs, "can_filter_calls", lambda: False)
    programs.warn_about_missing_isolation.cache_clear()
    run("print(1)")
    run("print(1)")
    programs.warn_about_missing_isolation.cache_clear()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "can read and write all files of this user, use the network, signal other processes of this user" in said


# ---- what a program leaves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        "os.chmod('file', 0); os.chmod('.', 0)",
        "os.remove('file'); os.mkfifo('file')",
        "os.remove('file'); os.symlink('/proc/self/mem', 'file')",
        "os.remove('file'); os.symlink('x' * 4000, 'file')",
        "os.remove('program.py'); os.mkdir('program.py')",
        "os.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)",
        'exec(\'for _ in range(1100): os.mkdir("d"); os.chdir("d")\')',
    ],
)
@pytest.mark.parametrize("mounts", [pytest.param(True, marks=needs_shared_memory), False])
def test_what_a_program_leaves_is_removed(act, mounts, tmp_path, monkeypatch):
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(programs, "has_shared_memory", lambda: mounts)
    finished = run(f"import os\nprint(9, flush=True)\nopen('file', 'w').close()\n{act}")
    assert (finished.failure, finished.stdout) == (None, "9\n")
    assert not list(tmp_path.iterdir())


def test_a_link_of_a_program_leads_to_nothing_that_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "has_shared_memory", lambda: False)
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    deep = 'exec(\'for _ in range(1100): os.mkdir("d"); os.chdir("d")\')'
    assert run(f"import os\nos.symlink({str(kept)!r}, 'link')\n{deep}").failure is None
    assert kept.is_dir() and kept.stat().st_mode & 0o777 == 0o500
