"""What programs in responses can do in each mode of isolation, what is logged, and what they leave."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.rewards.modes import LANDLOCK, MODES, each_mode, needs_bubblewrap
from verl.processes.child import memory_of
from verl.processes.isolation import mode as mode_module
from verl.processes.isolation import program
from verl.processes.isolation.mode import Isolation
from verl.processes.isolation.program import Limits, _files_below, isolation, run_program, warn_about

ON_LINUX = sys.platform == "linux"


def run(code: str, mode: str, memory: int = 1 << 30, seconds: float = 60.0, stdin: str = ""):
    return run_program(code, limits=Limits(seconds, memory), mode=MODES[mode], stdin=stdin)


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


@needs_bubblewrap
@pytest.mark.parametrize("use", USES_OF_MULTIPROCESSING)
def test_programs_can_use_multiprocessing(use):
    code = "import concurrent.futures, os, multiprocessing as m\nfrom multiprocessing import shared_memory\n"
    code += "def square(x):\n    return x * x\n"
    body = USES_OF_MULTIPROCESSING[use].strip().replace("\n", "\n    ")
    finished = run(f"{code}if __name__ == '__main__':\n    {body}\n", "bubblewrap")
    assert finished.failure is None and finished.stdout == "5\n", finished


@needs_bubblewrap
def test_shared_memory_counts_as_memory():
    """What is mapped counts as memory of its process, too."""
    fill = "import time\nfor i in range(6): open(f'/dev/shm/{i}', 'wb').write(bytes(10 << 20))\n"
    assert run(fill + "print('written')", "bubblewrap", memory=200 << 20).stdout == "written\n"
    assert "No space left" in run(fill, "bubblewrap", memory=100 << 20).stderr
    more = run(fill + "block = bytes(b'x') * (50 << 20); time.sleep(30)", "bubblewrap", memory=120 << 20)
    assert more.failure == "used more than 120 MiB together"


@each_mode
def test_output_is_truncated(mode):
    finished = run("import time\nprint('x' * (3 << 20), flush=True)\ntime.sleep(30)", mode)
    assert finished.failure == "printed more than 1048576 bytes" and finished.stdout == "x" * (1 << 20)


@each_mode
def test_standard_input_is_a_file_of_its_size(mode):
    """Programs of contests read all of it at once."""
    code = "import os, mmap\nprint(os.read(0, os.fstat(0).st_size), open('/dev/stdin').read())\n"
    assert run(code, mode, stdin="given\n").stdout == "b'given\\n' given\n\n"


@each_mode
def test_what_solutions_need_is_allowed(mode):
    finished = run(
        "import os, random, shutil, socket, subprocess, sys, tempfile\n"
        "import numpy as np\n"
        "a, b = socket.socketpair(); a.send(b'pair'); print(b.recv(4).decode())\n"
        "with tempfile.NamedTemporaryFile('w+') as f: f.write('file'); f.seek(0); print(f.read())\n"
        "os.makedirs('d/e'); open('x', 'w').write('moved'); os.rename('x', 'd/e/x'); print(open('d/e/x').read())\n"
        "shutil.rmtree('d')\n"
        "print(subprocess.run(['sh', '-c', 'echo child'], capture_output=True, text=True, check=True).stdout, end='')\n"
        "open('x', 'w').write('#!/bin/sh'); shutil.copy2('x', 'y')\n"
        "import asyncio, sqlite3, threading, zipfile\n"
        "asyncio.run(asyncio.sleep(0)); t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        "c = sqlite3.connect('f.db'); c.execute('create table t (x)'); c.commit(); print(open('f.db', 'rb').read(6))\n"
        "print(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout, end='')\n"
        "print(int(np.arange(4).sum()), len(os.urandom(4)), open('/dev/null').read() == '')\n",
        mode,
    )
    assert finished.failure is None and finished.stdout == (
        "pair\nfile\nmoved\nchild\nthread\nb'SQLite'\n5\n6 4 True\n"
    )


@pytest.mark.skipif(not ON_LINUX, reason="/proc")
@each_mode
def test_pages_shared_with_children_count_once(mode):
    fork = "import os, time\nblock = b'x' * (60 << 20)\n"
    fork += "for _ in range(8):\n    if os.fork() == 0:\n        time.sleep(0.5)\n        os._exit(0)\n"
    finished = run(fork + "for _ in range(8): os.wait()\nprint('all have ended')", mode, memory=200 << 20)
    assert finished.stdout == "all have ended\n", finished


@pytest.mark.skipif(not ON_LINUX, reason="/proc")
@pytest.mark.parametrize("name", [b"\x0bVmSwap: -99999", b"\x85VmSwap: -99999", b"\xff"])
def test_the_name_of_a_process_does_not_change_its_memory(name):
    """15 bytes that a process chooses are in the file that is read."""
    rename = f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); print('x', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert memory_of([process.pid]) > 1 << 20
        process.stdin.write(b"\n")


def test_files_are_measured(tmp_path):
    for i in range(3):
        (tmp_path / str(i)).write_bytes(b"x" * (1 << 20))
    (tmp_path / "folder").mkdir()
    count, size = _files_below(str(tmp_path))
    assert count == 4 and 3 << 20 <= size < 4 << 20


@pytest.mark.skipif(not ON_LINUX or os.getuid() != 0, reason="rights of root")
def test_a_program_is_measured_ahead_of_all_others(monkeypatch):
    """A fork bomb of root, which the kernel does not limit, must not take the processors from this thread."""
    thread, seen, wait = threading.get_native_id(), [], program._wait
    monkeypatch.setattr(
        program, "_wait", lambda *args: (seen.append(os.getpriority(os.PRIO_PROCESS, thread)), wait(*args))[1]
    )
    before = os.getpriority(os.PRIO_PROCESS, thread)
    run("", "landlock")
    assert seen == [-20] and os.getpriority(os.PRIO_PROCESS, thread) == before


def test_a_program_ends_before_the_host_is_out_of_memory(monkeypatch, caplog):
    """The file says that 100 MiB of 16 GiB are available."""
    real = Path.read_text
    text = "MemTotal:       16777216 kB\nMemAvailable:     102400 kB\nShmem: 0 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda p, **kw: text if str(p) == "/proc/meminfo" else real(p, **kw))
    finished = run("import time\ntime.sleep(9)", "landlock")
    assert finished.failure == "ran while the host had less than 512 MiB of memory"
    assert "the host has less than 512 MiB" in caplog.text


# ---- the mode -------------------------------------------------------------------------------------------------------


@pytest.fixture
def detected(monkeypatch):
    """Detect the mode again."""

    def detect(**changes: object) -> Isolation:
        for name, value in changes.items():
            for module in (program, mode_module):
                monkeypatch.setattr(module, name, value, raising=False)
        return isolation.__wrapped__()

    return detect


@needs_bubblewrap
def test_bubblewrap_is_the_default_and_nothing_is_weaker(detected, caplog):
    mode = detected()
    warn_about.__wrapped__(mode)
    assert mode.bubblewrap and mode.describe() == "bubblewrap and seccomp" and not mode.weaker
    assert not caplog.records


@pytest.mark.skipif(not ON_LINUX, reason="Linux isolates programs")
def test_one_line_says_what_is_weaker_without_bubblewrap(detected, caplog):
    mode = detected(shutil=type("shutil", (), {"which": staticmethod(lambda name: None)}))
    warn_about.__wrapped__(mode)
    (message,) = [record.getMessage() for record in caplog.records]
    assert mode.bubblewrap is None and "without bubblewrap (bwrap is missing: apt install bubblewrap)" in message
    assert "see names and times of files" in message and "queues of multiprocessing" in message


def test_what_the_kernel_lacks_is_named(detected):
    lacking = LANDLOCK
    mode = detected(landlock_abi=lambda: -1, compile_filter=lambda *a: b"")
    weaker = set(lacking.weaker) | set(mode.weaker)
    assert {"read and write all files of this user", "use all system calls"} <= weaker
    assert "resource limits; without bubblewrap" in lacking.describe()


@needs_bubblewrap
def test_a_bubblewrap_that_does_not_work_is_not_used(detected, tmp_path):
    """As in a container that does not allow namespaces."""
    command = tmp_path / "bwrap"
    command.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    command.chmod(0o755)
    mode = detected(shutil=type("shutil", (), {"which": staticmethod(lambda name: str(command))}))
    assert mode.bubblewrap is None and "No permissions to create new namespace" in mode.describe()
    with pytest.raises(OSError, match="bubblewrap cannot start a program: bwrap: No permissions"):
        run_program("print(1)", limits=Limits(9.0), mode=Isolation(str(command)))


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
        "os.mkdir('a', 0)",
        'exec(\'for _ in range(1100): os.mkdir("d"); os.chdir("d")\')',
    ],
)
@each_mode
def test_what_a_program_leaves_is_removed(act, mode, tmp_path, monkeypatch):
    monkeypatch.setattr(program.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(program, "MEASURE_SECONDS", 60.0)  # a folder that cannot be measured ends a program
    finished = run(f"import os\nprint(9, flush=True)\nopen('file', 'w').close()\n{act}", mode)
    assert (finished.failure, finished.stdout) == (None, "9\n")
    assert not list(tmp_path.iterdir())


def test_a_link_of_a_program_leads_to_nothing_that_is_removed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    deep = 'exec(\'for _ in range(1100): os.mkdir("d"); os.chdir("d")\')'
    run(f"import os\nos.symlink({str(kept)!r}, 'link')\n{deep}", "landlock")
    assert kept.is_dir() and kept.stat().st_mode & 0o777 == 0o500
