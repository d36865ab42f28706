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
#: runs in a thread, after the first one of its process has ended
HOLD = (
    'HOLD = """import ctypes, threading\ndef hold():\n    time.sleep(0.3); {act}; time.sleep(60)\n'
    'threading.Thread(target=hold).start(); ctypes.CDLL(None).syscall(60, 0)"""\n'
)
MAPPINGS = (
    "import ctypes, os\nlibc, size = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t\n"
    "libc.mmap.restype = ctypes.c_void_p\nlibc.munmap.argtypes = [size, size]\n"
    "libc.mmap.argtypes = [size, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]\nFAILED = 2**64 - 1\n"
    "def fail(): raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
)
HIDDEN = (
    "names, i = ['a', 'b'], 0\nwhile i < 400:\n    try: f = os.open(f'{names[0]}/{i}', os.O_RDWR | os.O_CREAT)\n"
    "    except OSError as error:\n        if error.errno == 28: raise\n        names.reverse(); continue\n"
    "    os.write(f, bytes((1 << 20) - 1)); os.close(f); i += 1\nimport time; time.sleep(9)"
)
TOGETHER, TASKS = "used more than 200 MiB together", "had more than 256 processes and threads"
OPEN_FILES, LATE = "had more than 1024 open files and pipes", "did not end within 1 s"
NO_MEMORY, NO_FILES = "MemoryError", "made more than 4096 files"

#: name -> program, texts of which one is in the failure or on standard error
EXHAUST = {
    "heap": ("b = bytearray(1 << 30)", NO_MEMORY),
    "heap in small blocks": ("b = []\nwhile True: b.append(bytes(1 << 10))", NO_MEMORY, TOGETHER),
    "anonymous mapping": ("import mmap\nm = mmap.mmap(-1, 1 << 30)", "not permitted"),
    "private mapping": ("import mmap\nm = mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE)", "Cannot allocate memory"),
    "children": (CHILDREN.format(act="b = b'x' * (60 << 20)"), TOGETHER),
    "mappings of children": (
        CHILDREN.format(act="import mmap; m = mmap.mmap(-1, 60 << 20, flags=0x22); m.write(bytes(60 << 20))"),
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
    "/tmp": (FILL.format(folder="/tmp"), "No space left", "Permission denied", "Read-only file system"),
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
    "waits for input": ("import sys\nsys.stdin.read(); open('/dev/full').read(1 << 29)", LATE, NO_MEMORY),
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
    "threads of processes whose first thread has ended": (
        HOLD.format(act="b = b'x' * (30 << 20)") + CHILDREN.format(act="exec(HOLD)").replace("8", "16"),
        TOGETHER,
    ),
    "files of processes whose first thread has ended": (
        HOLD.format(act="b = [os.dup(0) for _ in range(200)]") + CHILDREN.format(act="exec(HOLD)"),
        OPEN_FILES,
    ),
    "shared memory that is unmapped": (
        MAPPINGS + "while True:\n    a = libc.mmap(0, (1 << 26) - 4096, 3, 0x21, -1, 0)\n    a == FAILED and fail()\n"
        "    ctypes.memset(a, 1, (1 << 26) - 4096); libc.munmap(a + 4096, (1 << 26) - 8192)",
        "held more than 100 MiB of removed files, shared memory or mappings",
    ),
    "page tables": (
        MAPPINGS + "for _ in range(3): os.fork()\n"
        "for i in range(40_000):\n    a = libc.mmap(1 << 40 | i << 21, 4096, 1, 0x32, -1, 0)\n"
        "    a == FAILED and fail()\n    ctypes.string_at(a, 1)\nimport time; time.sleep(60)",
        TOGETHER,
    ),
    "mappings": (MAPPINGS + "while True: libc.mmap(0, 4096, 1, 0x22, -1, 0)", LATE, TOGETHER),
    "mappings of many processes": (
        MAPPINGS + "import time\nfor i in range(60_000): libc.mmap(0, 4096, 1 + 2 * (i % 2), 0x22, -1, 0)\n"
        "for _ in range(99): os.fork() or time.sleep(60)\ntime.sleep(60)",
        *("held more than 100 MiB of removed files, shared memory or mappings", TOGETHER),
    ),
    "removed files that are mapped": (
        MAPPINGS + "for i in range(300):\n    f = os.open('x', os.O_RDWR | os.O_CREAT)\n"
        "    os.write(f, bytes((1 << 20) - 1)); libc.mmap(0, 4096, 1, 1, f, 0); os.close(f); os.remove('x')",
        *("No space left", "held more than 100 MiB of removed files"),
    ),
    "folders that are renamed": (
        "import os\nos.mkdir('a')\nif os.fork() == 0:\n    while True: os.rename('a', 'b'); os.rename('b', 'a')\n"
        + HIDDEN,
        *("wrote more than 100 MiB to files", "No space left"),
    ),
    "files beside others that come and go": (
        "import os\nos.mkdir('a')\nif os.fork() == 0:\n    while True:\n        for i in range(50): os.mkdir(f't{i}')\n"
        "        for i in range(50): os.rmdir(f't{i}')\n" + HIDDEN,
        *("wrote more than 100 MiB to files", "No space left"),
    ),
    "stops its group": ("import os, signal, time\nos.kill(0, signal.SIGSTOP); time.sleep(60)", LATE),
    "stops its group from a child": (
        "import os, signal, time\nif os.fork() == 0: os.kill(0, signal.SIGTSTP); os.killpg(0, signal.SIGSTOP)\n"
        "time.sleep(60)",
        LATE,
    ),
    "ends its group": ("import os, signal\nos.kill(0, signal.SIGTERM)", "ended by SIGTERM"),
    "threads that come and go": (
        "import os, threading\nfor _ in range(4): os.fork()\nwhile True:\n"
        "    t = threading.Thread(target=int); t.start(); t.join()",
        *(LATE, TOGETHER),
    ),
    "locks of files": (
        "import fcntl\nf = open('x', 'w')\ni = 0\nwhile True: i += 2; fcntl.lockf(f, fcntl.LOCK_EX, 1, i)",
        LATE,
    ),
    "timers of the kernel": (
        MAPPINGS + "t = ctypes.c_int()\nwhile True: libc.timer_create(0, None, ctypes.byref(t))",
        LATE,
    ),
    "event descriptors": ("import os\nkeep = [os.eventfd(0) for _ in range(300)]", "Too many open files"),
    "executes itself": (
        "import os, sys\ncode = 'import os, sys; os.execv(sys.executable, [*sys.orig_argv])'\n"
        "os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', code])",
        LATE,
    ),
    "long names": (
        "import os\nfor _ in range(200): os.mkdir('d' * 255); os.chdir('d' * 255)",
        *("cannot be measured", "No space left", ""),
    ),
    "a long end": ("import atexit, time\natexit.register(time.sleep, 60)", LATE),
    "a finalizer that does not end": (
        "import time\nclass A:\n    def __del__(self): time.sleep(60)\na = A()\ndel a",
        LATE,
    ),
    "an error that does not end": (
        "import time\nclass E(Exception):\n    def __str__(self): time.sleep(60)\nraise E",
        LATE,
    ),
    "a thread that does not end": ("import threading, time\nthreading.Timer(60, print).start()", LATE),
    "a number": ("x = 1 << (1 << 33)", NO_MEMORY),
    "a text": ("x = 'x' * (1 << 30)", NO_MEMORY),
    "data that expands": ("import zlib\nx = zlib.decompress(zlib.compress(bytes(1 << 26))) * 9", NO_MEMORY),
    "a regular expression": ("import re\nre.match('(a+)+b', 'a' * 99)", LATE, "of processor time"),
    "hashes that collide": ("x = {i * (2**61 - 1): 0 for i in range(10**5)}", LATE, "of processor time"),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        *(LATE, NO_MEMORY, "SIGSEGV", TOGETHER),
    ),
    "recursion of the interpreter": (
        "import sys\nsys.setrecursionlimit(10**9)\nx = ()\nfor _ in range(10**6): x = (x,)\nhash(x)",
        *("SIGSEGV", NO_MEMORY, TOGETHER),
    ),
    "deep folders": ("import os, time\nfor _ in range(900): os.mkdir('d'); os.chdir('d')\n", ""),
}
FAST = {
    "stops its group",
    "shared memory that is unmapped",
    "children",
    "fork bomb",
    "many files",
    "disk",
    "output",
    "ignored signals",
    "a daemon",
}


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


@pytest.mark.fast("[!m]*", "many files-bubblewrap")
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


@pytest.mark.parametrize(("files", "ended"), [(0, False), (250, True)])
def test_a_disk_is_not_filled(files, ended, monkeypatch):
    """By removed files that are mapped; a disk that others fill is not the fault of the program."""
    states = iter([(9 << 30, 0, 0)])
    monkeypatch.setattr(program, "_room", lambda folder: next(states, (1 << 29, 0, 0)))
    code = f"""{MAPPINGS}import time
for i in range({files}):
    f = os.open('x', os.O_RDWR | os.O_CREAT); libc.mmap(0, 4096, 1, 1, f, 0); os.close(f); os.remove('x')
time.sleep(0.4)"""
    finished = run_program(code, limits=Limits(15.0, MEMORY), mode=MODES["landlock"])
    assert finished.failure == ("held more than 100 MiB of removed files, shared memory or mappings" if ended else None)


@each_mode
def test_processes_share_memory(mode):
    """Without a file, which nothing can count: mappings below 64 MiB, also when others use shared memory."""
    code = """import mmap, os
m = [mmap.mmap(-1, (1 << 26) - 4096), *(mmap.mmap(-1, 4096) for _ in range(9))]
if os.fork() == 0:
    for each in m: each[:3] = b'yes'
    os._exit(0)
os.wait()
print(*(each[:3].decode() for each in m))
try: mmap.mmap(-1, 1 << 26)
except PermissionError: print('refused')"""
    finished = run_program(code, limits=Limits(15.0, MEMORY), mode=MODES[mode])
    assert finished.failure is None and finished.stdout.split() == ["yes"] * 10 + ["refused"]
