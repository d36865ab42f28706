"""Programs that take memory, disk space, processes or time: each ends at a limit, and no process of it is left."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.rewards.modes import MODES, each_mode
from verl.processes.isolation import program
from verl.processes.isolation.program import Limits, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux isolates programs")

MEMORY = 200 << 20
CHILDREN = (
    "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        {act}\n        time.sleep(60)\ntime.sleep(60)"
)
FILL = "for i in range(10_000):\n    with open(f'{folder}/{{i}}', 'wb', 0) as f: f.write(bytes(1 << 20))"
TOGETHER, TASKS = "used more than 200 MiB together", "had more than 256 processes and threads"
OPEN_FILES, LATE = "had more than 1024 open files and pipes", "did not end within 1 s"
NO_MEMORY, NO_FILES = "MemoryError", "made more than 4096 files"

#: name -> program, texts of which one is in the failure or on standard error
EXHAUST = {
    "heap": ("b = bytearray(1 << 30)", NO_MEMORY),
    "heap in small blocks": ("b = []\nwhile True: b.append(bytes(1 << 10))", NO_MEMORY, TOGETHER),
    "anonymous mapping": ("import mmap\nm = mmap.mmap(-1, 1 << 30)", "Cannot allocate memory"),
    "private mapping": ("import mmap\nm = mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE)", "Cannot allocate memory"),
    "children": (CHILDREN.format(act="b = b'x' * (60 << 20)"), TOGETHER),
    "shared mappings of children": (
        CHILDREN.format(act="import mmap; m = mmap.mmap(-1, 60 << 20); m.write(bytes(60 << 20))"),
        TOGETHER,
    ),
    "grandchildren whose parents have exited": (
        CHILDREN.format(act="os.fork() and os._exit(0); os.fork() and os._exit(0); b = b'x' * (60 << 20)"),
        TOGETHER,
    ),
    "a child without its own group": (CHILDREN.format(act="os.setpgid(0, 0); b = b'x' * (60 << 20)"), TOGETHER),
    "a stack": (
        "import threading\nthreading.stack_size(1 << 29)\nthreading.Thread(target=print).start()",
        *("can't start new thread", "cannot allocate"),
    ),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", TASKS, TOGETHER),
    "fork bomb whose parents exit": (
        "import os\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n        os.fork()\n"
        "    except OSError: pass",
        *(TASKS, TOGETHER, ""),
    ),
    "processes that sleep": (
        "import os, time\nfor _ in range(400):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)",
        *(TASKS, TOGETHER),
    ),
    "threads": (
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "for _ in range(2000): threading.Thread(target=time.sleep, args=(60,)).start()\ntime.sleep(60)",
        *(TASKS, "can't start new thread"),
    ),
    "zombies": ("import os, time\nfor _ in range(400):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(60)", TASKS),
    "socket buffers": (
        CHILDREN.format(act="exec(FILL_SOCKETS)").replace(
            "import",
            "FILL_SOCKETS = '''import socket\nkeep = []\n"
            "while True:\n    for s in socket.socketpair():\n        s.setblocking(False); keep.append(s)\n"
            "        try:\n"
            "            while True: s.send(bytes(1 << 16))\n        except BlockingIOError: pass'''\nimport",
            1,
        ),
        *(OPEN_FILES, "Too many open files"),
    ),
    "pipes": (
        CHILDREN.format(act="[os.write(os.pipe()[1], bytes(1 << 12)) for _ in range(1000)]"),
        *(OPEN_FILES, "Too many open files"),
    ),
    "larger pipes": ("import fcntl, os\nfcntl.fcntl(os.pipe()[1], 1031, 1 << 20)", "PermissionError"),
    "open files": ("keep = [open('program.py') for _ in range(300)]", "Too many open files"),
    "many files": ("import time\nfor i in range(6000): open(str(i), 'w').close()\ntime.sleep(9)", NO_FILES),
    "many folders": ("import os, time\nfor i in range(6000): os.mkdir(str(i))\ntime.sleep(9)", NO_FILES),
    "many links": (
        "import os, time\nopen('x', 'w')\nfor i in range(6000): os.symlink('x', str(i))\ntime.sleep(9)",
        NO_FILES,
    ),
    "disk": (FILL.format(folder="."), "No space left", "wrote more than 100 MiB to files"),
    "shared memory": (FILL.format(folder="/dev/shm"), "No space left", "Permission denied"),
    "/tmp": (FILL.format(folder="/tmp"), "No space left", "Permission denied"),
    "one file": ("f = open('x', 'wb', 0)\nwhile True: f.write(bytes(1 << 20))", "No space left", "File too large"),
    "deleted files": (
        "import os\nkeep = []\nfor i in range(250):\n    f = open('x', 'wb', 0); os.remove('x'); keep.append(f)\n"
        "    f.write(bytes(1 << 20)); f.write(bytes(1 << 20))",
        *("No space left", "File too large"),
    ),
    "a file without a name": (
        "import os\nf = os.open('.', os.O_TMPFILE | os.O_WRONLY)\nwhile True: os.write(f, bytes(1 << 20))",
        *("No space left", "File too large", "Operation not supported"),
    ),
    "sparse file in use": (
        "import mmap\nf = open('x', 'w+b'); f.truncate(1 << 28)\nm = mmap.mmap(f.fileno(), 1 << 28)\n"
        "m.write(bytes(1 << 20) * 256)",
        *("Cannot allocate memory", "File too large", NO_MEMORY),
    ),
    "output": ("while True: print('x' * 10_000)", "printed more than 1048576 bytes"),
    "errors": ("import sys\nwhile True: print('x' * 10_000, file=sys.stderr)", "printed more than 1048576 bytes"),
    "output of a child": (
        "import os\nif os.fork():\n    os.wait()\nwhile True: os.write(1, bytes(10_000))",
        "printed more than 1048576 bytes",
    ),
    "output by its path": (
        "f = open('/proc/self/fd/1', 'wb')\nwhile True: f.write(bytes(10_000))",
        "printed more than",
    ),
    "sleep": ("import time\ntime.sleep(60)", LATE),
    "loop": ("while True: pass", LATE, "of processor time"),
    "loops of children": (CHILDREN.format(act="exec('while True: pass')"), LATE),
    "ignored signals": (
        "import signal, time\nfor s in set(signal.valid_signals()) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
        "while True: time.sleep(1)",
        LATE,
    ),
    "blocked signals": (
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(60)",
        LATE,
    ),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", LATE),
    "stops its parents": (
        "import os, signal, time\nfor pid in (os.getppid(), 1):\n    try: os.kill(pid, signal.SIGSTOP)\n"
        "    except OSError: pass\ntime.sleep(60)",
        LATE,
    ),
    "waits for input": ("import sys\nsys.stdin.read(); open('/dev/zero').read(1 << 29)", LATE, NO_MEMORY),
    "a fifo": ("import os\nos.mkfifo('f'); open('f').read()", LATE),
    "closed streams": ("import os, time\nos.closerange(0, 99); time.sleep(60)", LATE),
    "a child that holds the streams": (
        "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint(1)",
        "",
    ),
    "a daemon": (
        "import os, time\nif os.fork() == 0:\n    if os.fork() == 0:\n        os.closerange(0, 99); time.sleep(60)\n"
        "    os._exit(0)\nos.wait()",
        "",
    ),
    "a chain of processes": (
        "import os\nfor _ in range(1000):\n    if os.fork(): os._exit(0)\nimport time; time.sleep(60)",
        "",
    ),
    "a process that executes others": (
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(60)'])",
        LATE,
    ),
    "a program that cannot be read": (
        "import os, sys\ndata = open(sys.executable, 'rb').read()[:1 << 20]\n"
        "os.write(os.open('mine', os.O_CREAT | os.O_WRONLY, 0o111), data)\nos.execv('mine', ['mine'])",
        *("Exec format error", "cannot execute", "error while loading", "No such file", "ended by", "exit status"),
    ),
    "timers": (
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: 0)\nsignal.setitimer(0, 1e-6, 1e-6)\n"
        "while True: time.sleep(1)",
        LATE,
    ),
    "deep folders": ("import os, time\nfor _ in range(900): os.mkdir('d'); os.chdir('d')\n", ""),
}
FAST = {"children", "fork bomb", "many files", "disk", "output", "ignored signals", "a daemon"}


@pytest.fixture
def sessions(monkeypatch):
    """The sessions of the programs of a test: they cannot leave them."""
    pids, start = [], program._Process.__init__

    def record(self, *arguments):
        start(self, *arguments)
        pids.append(self.popen.pid)

    monkeypatch.setattr(program._Process, "__init__", record)
    return pids


def processes_in(sessions: list[int]) -> list[int]:
    remaining = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        remaining += [int(folder.name)] * (int(fields[3]) in sessions and fields[0] != "Z")
    return remaining


@each_mode
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in EXHAUST])
def test_what_takes_too_much_is_ended(name, mode, sessions, tmp_path, monkeypatch):
    monkeypatch.setattr(program.tempfile, "tempdir", str(tmp_path))
    code, *texts = EXHAUST[name]
    seconds = 1.0 if LATE in texts else 15.0
    begun = time.monotonic()
    finished = run_program(code, limits=Limits(seconds, MEMORY), mode=MODES[mode])
    assert any(text in f"{finished.failure} {finished.stderr}" for text in texts), finished
    assert time.monotonic() - begun < seconds + 60  # a busy disk removes a folder in milliseconds
    assert len(sessions) == 1 and not processes_in(sessions)
    assert not os.listdir(tmp_path)
