"""Run an untrusted program, with limits on time, memory and output.

    finished = run_program("print(input())", limits=Limits(seconds=10), stdin="1")
    finished.failure, finished.stdout          # None, "1\n"

Where bubblewrap works, the program has separate user, mount, process, network and IPC namespaces, a read-only root, and
a working folder in memory. Elsewhere it is confined by Landlock and seccomp (see `mode` and docs/security.md). It is
measured from outside, and all processes that it starts end with it. The kernel is shared: isolating a program that
attacks the kernel needs a virtual machine.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import logging
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from verl.processes.child import descendants, memory_of, thread_folder
from verl.processes.isolation.boot import landlock_abi
from verl.processes.isolation.mode import SHARED_MEMORY, Isolation

logger = logging.getLogger("verl.rewards")

MEASURE_SECONDS = 0.05  # between two measurements
#: of one program: processes and threads, open files and pipes (a socket holds up to 0.4 MiB of the kernel's memory),
#: the same of one process, files and folders
MOST_TASKS, MOST_OPEN_FILES, MOST_OPEN_FILES_OF_PROCESS, MOST_FILES = 256, 1024, 256, 4096
MOST_SHARED_BYTES = 1 << 26  # of one mapping without a file (system_calls.yaml)
MAPPING_BYTES = 256  # of the kernel, for one mapping of a process
MOST_READ_PROCESSES = 32  # whose shared pages count once: reading them waits for locks of these processes
_SIGNALS = {128 + number.value: number.name for number in signal.Signals}
_END_SECONDS = 5.0  # for the supervisor (boot.py) to end the processes that a program has left


@dataclass(frozen=True)
class Limits:
    """Limits of a program with all processes that it starts.

    Attributes:
        seconds: Elapsed time. The processor time of one process has the same limit, rounded up.
        memory_bytes: Memory, with files in memory (Linux only).
        output_bytes: Standard output; also standard error.
    """

    seconds: float
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Finished:
    """The result of a program.

    Attributes:
        failure: None if it exited with status 0, otherwise why not: a predicate whose subject is the program.
        stdout: Standard output, truncated at the limit.
        stderr: Standard error, truncated at the limit.
    """

    failure: str | None
    stdout: str
    stderr: str


def run_program(
    code: str,
    *,
    limits: Limits,
    stdin: str = "",
    arguments: Sequence[str] = (),
    peer_arguments: Sequence[str] | None = None,
    mode: Isolation | None = None,
) -> Finished:
    """Run Python `code` as a script in an empty folder, with this interpreter and without its environment.

    Args:
        code: The source of the script.
        limits: Limits on time, memory and output.
        stdin: Text for standard input.
        arguments: Of the script.
        peer_arguments: Run the script a second time with these, isolated from the first one, until that ends. Both get
            two further arguments: the descriptors of pipes to read from the other one, and to write to it. They share
            the working folder, for files that a test gives to a program; neither imports from it.
        mode: None: the strongest that works here.

    Raises:
        OSError: The program cannot be started.
    """
    mode, processes, pipes = mode or isolation(), [], [(), ()]
    is_alone, folder = peer_arguments is None, None
    warn_about(mode)
    with contextlib.ExitStack() as stack:
        if not (mode.bubblewrap and is_alone):
            folder = tempfile.mkdtemp(prefix="program-")
            stack.callback(_remove, folder)
        try:
            if not is_alone:
                (reads, peer_writes), (peer_reads, writes) = os.pipe(), os.pipe()
                pipes = [(reads, writes), (peer_reads, peer_writes)]
            settings = mode.settings(code, _resources(limits, folder), is_alone)
            starts = [(arguments, stdin, pipes[0], limits, mode, folder, subprocess.PIPE)]
            starts += [] if is_alone else [(peer_arguments, "", pipes[1], limits, mode, folder, subprocess.DEVNULL)]
            for start in starts:
                processes.append(_Process(settings, *start))
                stack.callback(processes[-1].close)
        finally:
            for descriptor in sum(pipes, ()):
                os.close(descriptor)
        with _ahead_of_programs() if sys.platform == "linux" else contextlib.nullcontext():
            return _wait(processes, limits)


@contextlib.contextmanager
def _ahead_of_programs() -> Iterator[None]:
    """Give this thread the first right to a processor, as far as it may (root on Linux).

    The kernel does not limit the number of root's processes: a fork bomb that is not counted in time takes them all.
    """
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, thread, -20)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, thread, before)


def _wait(processes: "Sequence[_Process]", limits: Limits) -> Finished:
    """Wait until the first process has ended or one exceeds a limit."""
    deadline, failure, is_running = time.monotonic() + limits.seconds, None, True
    while is_running and failure is None:
        try:
            outputs, is_running = processes[0].popen.communicate(timeout=MEASURE_SECONDS), False
        except subprocess.TimeoutExpired as error:
            outputs = (error.stdout or b"", error.stderr or b"")
        if max(map(len, outputs)) > limits.output_bytes:
            failure = f"printed more than {limits.output_bytes} bytes"
        elif is_running and time.monotonic() >= deadline:
            failure = f"did not end within {limits.seconds:g} s"
        elif is_running:
            failure = next(filter(None, (process.excess() for process in processes)), None)
    status = processes[0].end()
    if status == 128 + signal.SIGXCPU:
        failure = f"used more than {limits.seconds:g} s of processor time"
    elif failure is None and status:
        failure = f"ended by {_SIGNALS[status]}" if status in _SIGNALS else f"ended with exit status {status}"
    return Finished(failure, *(data[: limits.output_bytes].decode("utf-8", errors="replace") for data in outputs))


class _Process:
    """A running program."""

    def __init__(
        self,
        settings: bytes,
        arguments: Sequence[str],
        stdin: str,
        pipes: Sequence[int],
        limits: Limits,
        mode: Isolation,
        folder: str | None,
        output: int,
    ):
        self._limits, self._folder, self._descriptor = limits, folder, None
        self._before = _room(folder) if sys.platform == "linux" else ()
        with (
            _input_file(settings) as settings_file,
            _input_file(stdin.encode(errors="replace")) as stdin_file,
            _input_file(mode.call_filter(is_alone=not pipes)) as filter_file,
            contextlib.ExitStack() as stack,
        ):
            reading, writing = os.pipe()
            info, their_info = stack.enter_context(open(reading, "rb")), stack.enter_context(open(writing, "wb"))
            for_bubblewrap = [their_info.fileno(), filter_file.fileno()]
            command = mode.command(folder, limits.memory_bytes // 2, *for_bubblewrap)
            self.popen = subprocess.Popen(
                [*command, str(settings_file.fileno()), *arguments, *map(str, pipes)],
                pass_fds=[settings_file.fileno(), *pipes, *(for_bubblewrap if mode.bubblewrap else [])],
                env=mode.environment(folder),
                cwd=folder,
                stdin=stdin_file,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            their_info.close()
            self._root = self.popen.pid
            if mode.bubblewrap:
                self._open_namespace(info)

    def _open_namespace(self, info: BinaryIO) -> None:
        """Find process 1 of the namespace, which bubblewrap names in `info`."""
        try:
            self._root = json.load(info)["child-pid"]
            self._descriptor = os.pidfd_open(self._root)
        except (ValueError, OSError) as error:
            self.popen.kill()
            message = (self.popen.communicate()[1] or b"").decode(errors="replace").strip()
            raise OSError(f"bubblewrap cannot start a program: {message or error}") from error

    def excess(self) -> str | None:
        """The limit that the program exceeds now, as a predicate (Linux)."""
        if sys.platform != "linux":
            return None
        tasks, open_files, memory = 0, 0, self._limits.memory_bytes
        too_many = f"had more than {MOST_TASKS} processes and threads"
        # first their number, and no more of it than needed: a fork bomb grows faster than processes are measured
        pids = [self._root, *itertools.islice(descendants(self._root), MOST_TASKS + 1)]
        if len(pids) > MOST_TASKS + 1:
            return too_many
        for pid in pids[1:]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has exited since
                tasks += len(os.listdir(f"/proc/{pid}/task"))
                open_files += _open_files(pid)
        if tasks > MOST_TASKS:
            return too_many
        if open_files > MOST_OPEN_FILES:
            return f"had more than {MOST_OPEN_FILES} open files and pipes"
        try:
            (files, in_memory), (files_on_disk, on_disk) = self._files_in_memory(), _files_below(self._folder)
        except OSError:
            return "made folders that cannot be measured"
        if files + files_on_disk > MOST_FILES:
            return f"made more than {MOST_FILES} files"
        if max(in_memory, on_disk) > memory // 2:
            return f"wrote more than {memory // 2 >> 20} MiB to files"
        ways = (False, True) if len(pids) <= MOST_READ_PROCESSES else (False,)
        if all(in_memory + memory_of(pids, shared_once) > memory for shared_once in ways):
            return f"used more than {memory >> 20} MiB together"
        disk, shared, host = (before - now > memory // 2 for before, now in zip(self._before, _room(self._folder)))
        if disk or shared or host:  # others may have it
            files, shares, mappings = _unmeasured(pids, memory // 2 // MAPPING_BYTES)
            held = files * self._limits.output_bytes * disk, shares * MOST_SHARED_BYTES * shared
            if max(*held, mappings * MAPPING_BYTES * host) > memory // 2:
                return f"held more than {memory // 2 >> 20} MiB of removed files, shared memory or mappings"
        return _host_excess()

    def _files_in_memory(self) -> tuple[int, int]:
        """Number and size of the files, also of those that are deleted and open."""
        if self._descriptor is None:
            return 0, 0
        try:
            mounted = os.statvfs(f"/proc/{self._root}/root{SHARED_MEMORY}")
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return 0, 0
        return mounted.f_files - mounted.f_ffree, (mounted.f_blocks - mounted.f_bfree) * mounted.f_frsize

    def end(self) -> int:
        """End all its processes. Returns the exit status."""
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it ends the others: there may be thousands
            os.setpriority(os.PRIO_PROCESS, self._root, -20)
        if self._descriptor is None:  # the supervisor ends the others: if it were killed, a fork bomb would go on
            self.popen.terminate()
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self.popen.wait(_END_SECONDS)
                self.popen.send_signal(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        poll = select.poll()  # `select.select` does not take descriptors above 1023
        poll.register(self._descriptor, select.POLLIN)
        poll.poll(1000 * _END_SECONDS)  # process 1 ends after all others
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # no process of its group is left
            os.killpg(self.popen.pid, signal.SIGKILL)
        return self.popen.wait()

    def close(self) -> None:
        """End it."""
        self.end()
        for stream in filter(None, (self.popen.stdout, self.popen.stderr)):
            stream.close()
        if self._descriptor is not None:
            os.close(self._descriptor)


def _remove(folder: str) -> None:
    """Remove a folder of any depth and permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):
        for command in (["chmod", "-R", "u+rwX", folder], ["rm", "-rf", folder]):
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


def _resources(limits: Limits, folder: str | None) -> dict[str, int]:
    """Limits of each process of a program. folder: on the disk, if it has one."""
    resources = {"RLIMIT_CPU": int(limits.seconds) + 1, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": MOST_OPEN_FILES_OF_PROCESS}
    if sys.platform == "linux":  # only Linux has a limit of the address space that programs survive
        # the kernel counts all of this user, and does not limit root
        tasks = int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[2])
        resources |= {"RLIMIT_AS": limits.memory_bytes, "RLIMIT_NPROC": tasks + MOST_TASKS}
    return resources | ({"RLIMIT_FSIZE": limits.output_bytes} if folder else {})


def _input_file(content: bytes) -> BinaryIO:
    """A file without a name that a program can read, and not write to (Linux)."""
    if sys.platform != "linux":
        file = tempfile.TemporaryFile()  # noqa: SIM115
        file.write(content)
        file.seek(0)
        return file
    with open(os.memfd_create("input", os.MFD_ALLOW_SEALING), "wb") as file:
        file.write(content)
        file.flush()
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return open(f"/proc/self/fd/{file.fileno()}", "rb")


def _open_files(pid: int) -> int:
    """The number of descriptors of a process, or as many as it can have if they cannot be read."""
    try:
        return len(os.listdir(thread_folder(pid) / "fd"))
    except PermissionError:  # the file of the program cannot be read, or it is a zombie, which has no memory
        return MOST_OPEN_FILES_OF_PROCESS if landlock_abi() > 0 and memory_of([pid]) else 0


def _files_below(folder: str | None) -> tuple[int, int]:
    """Number and size of the files and folders in a folder. Raises OSError if one of them cannot be read."""
    count, size, folders = 0, 0, [folder] if folder else []
    while folders and count <= MOST_FILES:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # the others are still there
                    info = entry.stat(follow_symlinks=False)
                    count, size = count + 1, size + info.st_blocks * 512
                    folders += [entry.path] if stat.S_ISDIR(info.st_mode) else []
    return count, size


def _unmeasured(pids: Sequence[int], most_mappings: int) -> tuple[int, int, int]:
    """Number of the removed files and of the shared memory without a file that processes have open or mapped, and of
    their mappings, of which the first `most_mappings` are read. Nothing shows what they hold: most of a file may be
    mapped nowhere, and the kernel needs memory for each mapping."""
    files, memory, mappings = set(), set(), 0
    gone = FileNotFoundError, ProcessLookupError  # it has exited or closed it since
    for pid in pids:
        with contextlib.suppress(*gone):
            folder = thread_folder(pid)
            try:
                text = (folder / "maps").read_bytes()
                entries = list(os.scandir(folder / "fd"))
            except PermissionError:
                files |= {(pid, number) for number in range(_open_files(pid))}
                continue
            mappings += text.count(b"\n")
            lines = text.split(b"\n") if b" (deleted)\n" in text else ()
            for parts in (line.split(None, 5) for line in lines if line.endswith(b" (deleted)")):
                device = os.makedev(*(int(number, 16) for number in parts[3].split(b":")))
                (memory if parts[5].startswith(b"/dev/zero ") else files).add((device, int(parts[4])))
            for entry in entries:
                with contextlib.suppress(*gone):
                    info = entry.stat()
                    files |= set() if info.st_nlink or not stat.S_ISREG(info.st_mode) else {(info.st_dev, info.st_ino)}
        if mappings > most_mappings:
            break
    return len(files), len(memory), mappings


def _room(folder: str | None) -> tuple[int, int, int]:
    """Free bytes of the disk of a folder, if it has one; what shared memory leaves, and free bytes, of the host."""
    disk, memory = os.statvfs(folder) if folder else os.statvfs_result((0,) * 10), _host_memory()
    return disk.f_bavail * disk.f_frsize, -memory["Shmem"], memory["MemAvailable"]


def _host_memory() -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return {name: int(text.split()[0]) << 10 for name, _, text in (line.partition(":") for line in lines)}


def _host_excess() -> str | None:
    """The kernel holds buffers, locks and inodes for programs, which are not all measured: a program ends before the
    host is out of memory."""
    memory = _host_memory()
    reserve = min(memory["MemTotal"] // 32, 1 << 30)
    if memory["MemAvailable"] >= reserve:
        return None
    logger.warning("a program in a response was ended: the host has less than %d MiB of memory", reserve >> 20)
    return f"ran while the host had less than {reserve >> 20} MiB of memory"


# ---- the mode of this machine ---------------------------------------------------------------------------------------


@functools.cache
def isolation() -> Isolation:
    """The strongest isolation that works here."""
    command = shutil.which("bwrap") if sys.platform == "linux" else None
    missing = "bwrap is missing: apt install bubblewrap" if sys.platform == "linux" else "it needs Linux"
    mode = Isolation(command, "" if command else missing)
    if command and (problem := _problem(mode)):
        mode = Isolation(problem=problem)
    return mode


@functools.cache
def warn_about(mode: Isolation) -> None:
    """Log, once, what is weaker in a mode."""
    if mode.weaker:
        logger.warning("programs in responses are isolated by %s (docs/security.md)", mode.describe())


def _problem(mode: Isolation) -> str:
    """Why programs cannot run in a mode; empty if they can."""
    try:
        finished = run_program("print(1)", limits=Limits(60.0), mode=mode)
    except OSError as error:
        return str(error)
    return "" if finished.stdout == "1\n" else f"{finished.failure}: {' '.join(finished.stderr.split())[-300:]}"
