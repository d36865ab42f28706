"""Python child processes for process pools.

    process = PythonProcess("verl.rewards.sandbox.worker", [theirs.fileno()], env=os.environ)
    status = process.poll()            # None while it runs
    process.kill()                     # the process and everything that it started
    describe_exit(process.wait())      # "was killed by SIGKILL ..."

Shared by the workers of `verl.single_controller.local` and the reward functions of `verl.rewards.sandbox`. Children are
fresh interpreters, not forks of this process: the threads, locks and CUDA context of a trainer do not survive a fork.
`verl.processes.fork_server` has a second kind of child, forked from a process that has none of these. The pools differ
in what they send, in their deadlines and in which errors end the pool; that is in their own modules.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_further: dict[str, str] = {}  # environment variables of helper processes
_SIGNAL_NAMES = {s.value: s.name for s in signal.Signals}
STACK_SIGNAL = signal.SIGUSR1  # blocked in a child until `dump_stacks_on_request`


class ChildProcess(ABC):
    """A Python process in a separate session and process group. Subclasses start it and report its exit status.

    Args:
        stacks: Whether the child gets a file for its stacks (see `dump_stacks_on_request`).
    """

    pid: int

    def __init__(self, stacks: bool):
        self._stacks = tempfile.TemporaryFile() if stacks else None  # noqa: SIM115

    @property
    def stack_descriptors(self) -> list[int]:
        """The descriptor of the file for the stacks, if there is one."""
        return [] if self._stacks is None else [self._stacks.fileno()]

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

    def request_stacks(self) -> None:
        """Ask the process to write the stacks of all its threads, which takes a moment."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, STACK_SIGNAL)

    def read_stacks(self) -> str:
        """The stacks written so far."""
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace").strip() or "(no stacks: the process did not respond)"

    def close(self) -> None:
        """Wait for a killed process and release its resources."""
        self.wait()
        self.close_stacks()

    def close_stacks(self) -> None:
        """Close the file for the stacks."""
        if self._stacks is not None:
            self._stacks.close()


class PythonProcess(ChildProcess):
    """`python -m MODULE FD...` in a new session and process group.

    Ctrl-C reaches this process only, which then ends its children. The child has the import path of this process
    and no stdin.

    Args:
        module: Module to run.
        inherited: File descriptors that the child inherits. Their numbers are its command-line arguments.
        env: Environment variables of the child; PYTHONPATH is set here.
        stacks: Pass a further descriptor, of a file for the stacks of the child (see `dump_stacks_on_request`).
    """

    def __init__(self, module: str, inherited: Sequence[int], env: Mapping[str, str], *, stacks: bool = False):
        super().__init__(stacks)
        descriptors = [*inherited, *self.stack_descriptors]
        # Inherited by the child: the signal would end it before it is ready to write its stacks.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL} if stacks else ())
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


def resident_memory(pid: int, shared_once: bool = False) -> int:
    """Resident memory of a process and its descendants in bytes (Linux). A process that has ended has none.

    Args:
        shared_once: Count a page that several of them share once, not in each. Takes milliseconds per GiB.
    """
    found, pids = 0, [pid]
    while pids:
        folder = Path(f"/proc/{pids.pop()}")
        with suppress(OSError, IndexError, ValueError):
            if shared_once:
                lines = (folder / "smaps_rollup").read_text(encoding="utf-8").splitlines()
                found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
            else:
                found += int((folder / "statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for thread in (folder / "task").iterdir():
                pids += map(int, (thread / "children").read_text(encoding="utf-8").split())
    return found


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


def dump_stacks_on_request(descriptor: int) -> None:
    """In a child: let `PythonProcess.request_stacks` write to `descriptor`, also while the child runs C code."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK_SIGNAL})
