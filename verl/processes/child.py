"""Python child processes: how they start, report to their parent and end.

    process = PythonProcess("verl.rewards.sandbox.worker", [theirs.fileno()], env=os.environ)
    status = process.poll()            # None while it runs
    process.end()                      # kills the process and everything that it started
    describe_exit(status)              # "was killed by SIGKILL ..."

Children are fresh interpreters, not forks of this process: the threads, locks and CUDA context of a trainer do not
survive a fork. `verl.processes.fork_server` has a second kind of child, forked from a process that has none of these.
"""

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

_further: dict[str, str] = {}  # environment variables of helper processes
_SIGNAL_NAMES = {s.value: s.name for s in signal.Signals}
STACK_SIGNAL = signal.SIGUSR1  # blocked in a child until `start_reports`


class ChildProcess(ABC):
    """A Python process in a separate session and process group. Subclasses start it and report its exit status.

    reports: Whether the child gets a file for its stacks (see `start_reports`).
    """

    pid: int

    def __init__(self, reports: bool):
        self._reports = tempfile.TemporaryFile(buffering=0) if reports else None  # noqa: SIM115

    @property
    def report_descriptors(self) -> list[int]:
        return [] if self._reports is None else [self._reports.fileno()]

    def poll(self) -> int | None:
        """The exit status (negative: the signal that killed it); None while the process runs."""
        return self.wait(0)

    @abstractmethod
    def wait(self, timeout: float | None = None) -> int | None:
        """Wait up to `timeout` seconds for the process to end; returns what `poll` returns then."""

    def exit_message(self) -> str | None:
        """How the process ended, as a sentence; None while it runs."""
        status = self.poll()
        return None if status is None else f"process {self.pid} {describe_exit(status)}"

    def kill(self) -> None:
        """Kill the process and everything that it started, also after the process itself has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, seconds: float = 0.0) -> int:
        """Wait up to `seconds` for the process to end, and kill what is left. Returns the exit status."""
        self.wait(seconds)
        self.kill()
        return self.wait()

    def request_stacks(self) -> None:
        """Ask the process to write the stacks of all its threads, which takes a moment."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, STACK_SIGNAL)

    def read_stacks(self) -> str:
        """The stacks written so far."""
        self._reports.seek(0)
        return self._reports.read().decode(errors="replace").strip() or "(no stacks: the process did not respond)"

    def close(self) -> None:
        """Wait for a killed process and release its resources."""
        self.wait()
        self.close_reports()

    def close_reports(self) -> None:
        if self._reports is not None:
            self._reports.close()


class PythonProcess(ChildProcess):
    """`python -m MODULE FD...` in a new session and process group.

    Ctrl-C reaches this process only, which then ends its children. The child has the import path of this process
    and no stdin.

    Args:
        module: Module to run.
        inherited: File descriptors that the child inherits. Their numbers are its command-line arguments.
        env: Environment variables of the child; PYTHONPATH is set here.
        reports: Pass a further descriptor, of a file for the reports of the child (see `start_reports`).
    """

    def __init__(self, module: str, inherited: Sequence[int], env: Mapping[str, str], *, reports: bool = False):
        super().__init__(reports)
        descriptors = [*inherited, *self.report_descriptors]
        # Inherited by the child: the signal would end it before it is ready to write its stacks.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL} if reports else ())
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, descriptors)],
                env={**env, "PYTHONPATH": import_path()},
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)
        return self._popen.returncode


def set_helper_environment(variables: Mapping[str, str]) -> None:
    """Set the environment variables that processes of reward functions, tools and agents have in addition to those of
    this process (`trainer.worker_env`). Processes that are running keep theirs."""
    _further.clear()
    _further.update(variables)


def helper_environment(**defaults: str) -> dict[str, str]:
    """The environment of a process that calls functions of the user. defaults: values of unset variables."""
    return {**defaults, **os.environ, **_further}


def process_status(pid: int) -> str:
    """The state of a process of this host, such as psutil.STATUS_STOPPED; STATUS_DEAD if there is none."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def descendants(pid: int) -> Iterator[int]:
    """The process ids of everything that a process has started, as far as their parents are alive (Linux)."""
    parents = deque([pid])
    while parents:
        children = _children(parents.popleft())
        parents += children
        yield from children


def _children(pid: int) -> list[int]:
    try:
        lists = [(thread / "children").read_bytes() for thread in Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for text in lists for child in text.split()]
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended, or a kernel without CONFIG_PROC_CHILDREN
        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(pid).children()]
        return []


def resident_memory(pid: int, shared_once: bool = False) -> int:
    """Memory of a process and its descendants in bytes, in RAM and swap (Linux): see `memory_of`."""
    return memory_of([pid, *descendants(pid)], shared_once)


def memory_of(pids: Iterable[int], shared_once: bool = False) -> int:
    """Memory of processes in bytes, in RAM and swap (Linux). A process that has ended has none.

    shared_once: Count a page that several of them share once, not in each, if this user may see that. Takes
        milliseconds per GiB.
    """
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has exited since
            folder = thread_folder(pid)
            try:
                total += _kibibytes(folder / "smaps_rollup", b"Pss:", b"SwapPss:") if shared_once else 0
                shared = shared_once
            except PermissionError:
                shared = False
            total += _kibibytes(folder / "status", b"VmPTE:", *(() if shared else (b"VmRSS:", b"VmSwap:")))
    return total << 10


def thread_folder(pid: int) -> Path:
    """The folder in /proc of a thread of a process that runs: the first one may have ended, and then shows nothing."""
    first = Path(f"/proc/{pid}")
    if _kibibytes(first / "status", b"VmRSS:"):
        return first
    return next((other for other in (first / "task").iterdir() if _kibibytes(other / "status", b"VmRSS:")), first)


def _kibibytes(file: Path, *names: bytes) -> int:
    # bytes: the name of the process may contain line breaks of Unicode
    return sum(int(line.split()[1]) for line in file.read_bytes().split(b"\n") if line.startswith(names))


def import_path() -> str:
    """PYTHONPATH of a child that imports what this process imports."""
    paths = [path or os.curdir for path in sys.path]
    # Other relative entries are names for the import hooks of packages, which the child has too.
    return os.pathsep.join(os.path.abspath(path) for path in paths if os.path.isabs(path) or os.path.exists(path))


def describe_exit(status: int) -> str:
    """How a process ended, as a predicate: "exited with status 1", "was killed by SIGSEGV"."""
    if status >= 0:
        return f"exited with status {status}"
    # The out-of-memory killer sends SIGKILL.
    hint = " (if no user or scheduler did it, the machine ran out of memory: see `dmesg`)"
    name = _SIGNAL_NAMES.get(-status, f"signal {-status}")
    return f"was killed by {name}{hint if status == -signal.SIGKILL else ''}"


def start_reports(descriptor: int) -> None:
    """In a child: write the stacks when the parent asks, also while C code runs."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK_SIGNAL})


# ---- channels -------------------------------------------------------------------------------------------------------

# ours, theirs = Channel.pair()
#     process = PythonProcess(module, [theirs.fileno()], env)     # there: Channel(int(sys.argv[1]))
#     ours.send(pickle.dumps(request))
#     data, descriptors = ours.receive()
#
# The fork server, reward workers, tools and local ranks share this framing; what the bytes are is in their modules.

_HEADER = struct.Struct("<QI")  # size in bytes, number of descriptors
_MAX_DESCRIPTORS = 250  # of one system call; Linux accepts up to 253
_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux only


class Channel:
    """One end of a connection. In each direction, one thread at a time may use it."""

    def __init__(self, descriptor: int):
        self._socket = socket.socket(fileno=descriptor)
        self._readable = select.poll()  # `select.select` does not take descriptors above 1023
        self._readable.register(descriptor, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        ours, theirs = socket.socketpair()
        return cls(ours.detach()), cls(theirs.detach())

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with copies of file descriptors. Raises ConnectionError if the other end is closed."""
        header = _HEADER.pack(len(data), len(descriptors))
        for start in range(0, len(descriptors), _MAX_DESCRIPTORS):
            socket.send_fds(self._socket, [header], descriptors[start : start + _MAX_DESCRIPTORS])
            header = b"+"  # descriptors cannot be sent without data
        self._socket.sendall(data if descriptors else header + data)

    def receive(self) -> tuple[bytes, list[int]]:
        """The next message: its bytes and file descriptors. Raises EOFError if the other end is closed."""
        header, descriptors = self._receive_descriptors(_HEADER.size)
        size, count = _HEADER.unpack(header + self._read(_HEADER.size - len(header)))
        while len(descriptors) < count:
            descriptors += self._receive_descriptors(1)[1]
        return self._read(size), descriptors

    def _receive_descriptors(self, size: int) -> tuple[bytes, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, size, _MAX_DESCRIPTORS, _FLAGS)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            raise EOFError("the other process closed the connection")
        return data, descriptors

    def _read(self, size: int) -> bytes:
        chunks = []
        while size:
            chunks.append(self._socket.recv(size, socket.MSG_WAITALL))
            size -= len(chunks[-1])
            if not chunks[-1]:
                raise EOFError("the other process closed the connection during a message")
        return b"".join(chunks)

    def has_message(self, timeout: float | None = 0.0) -> bool:
        """Whether a message or the end of the connection arrives within `timeout` seconds."""
        return bool(self._readable.poll(None if timeout is None else timeout * 1000))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# ---- processes that call functions of the user ----------------------------------------------------------------------

# helper = HelperProcess("verl.rewards.sandbox.worker", OMP_NUM_THREADS="1")
#     helper.send(message)
#     reply = helper.receive(timeout=1.0)        # None: no reply yet; EOFError: the process has ended
#     helper.end()                               # with everything that it started
#
#     parent = Parent()                          # in the process
#     parent.send("ready")
#     message = parent.receive()
#
# The pools differ in what they send, in their deadlines and in which errors end a process; that is in their modules.

START_SECONDS = 300.0  # for a process to start and import the files of the user: a shared disk can be slow at first
EXIT_SECONDS = 5.0  # between the end of the channel and that of the process
PARENT_SECONDS = 1.0  # between two checks of the parent


class HelperProcess(PythonProcess):
    """A process that calls functions of the user, with a channel to it.

    Args:
        module: Module to run; it makes a `Parent`.
        **defaults: Values of environment variables that are not set.
    """

    def __init__(self, module: str, **defaults: str):
        self.channel, theirs = Channel.pair()
        with theirs:
            super().__init__(module, [theirs.fileno()], helper_environment(**defaults))

    def send(self, message: bytes) -> None:
        """Send a pickled message. If the process has ended, `receive` reports that."""
        with contextlib.suppress(OSError):  # the channel may also be closed already, by another thread
            self.channel.send(message)

    def receive(self, timeout: float) -> Any:
        """The next message; None if there is none within `timeout` seconds.

        Raises:
            EOFError: The process has ended, and all its messages are read.
            Exception: The message cannot be unpickled, which runs code of the user.
        """
        if self.channel.has_message(timeout):
            return pickle.loads(self.channel.receive()[0])
        if self.has_ended():
            raise EOFError(f"process {self.pid} has ended")
        return None

    def has_ended(self) -> bool:
        """Whether the process has ended, and all its messages are read. A fork of it may keep the channel open."""
        return self.poll() is not None and not self.channel.has_message()

    def end(self, seconds: float = 0.0) -> int:
        """See `ChildProcess.end`. Closes the channel."""
        status = super().end(seconds)
        self.channel.close()
        return status


class Parent:
    """In a helper process: the channel to its parent. The process ends with its parent, also while a function hangs."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # if the machine runs out of memory, this process ends, not the trainer
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
        self._channel, self._pid = Channel(int(sys.argv[1])), os.getpid()
        threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send a message.

        A function that forks returns twice. The fork has the same channel, and its reply would be taken for that of
        this process, so it ends.
        """
        if os.getpid() != self._pid:
            os._exit(0)
        data = pickle.dumps(message)
        try:
            self._channel.send(data)
        except ConnectionError:
            os._exit(0)

    def receive(self) -> Any:
        """The next message. The process ends if the parent has closed the channel."""
        try:
            data, _ = self._channel.receive()
        except EOFError:
            os._exit(0)
        return pickle.loads(data)


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)
