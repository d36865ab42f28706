"""The supervisor of a program: sets its limits, waits for it, and ends all its child processes.

    python -I program_boot.py CPU_SECONDS MEMORY_BYTES OUTPUT_BYTES PROGRAM [ARGUMENT ...]      (-1: no limit)

Exits like the program: with its exit status, or 128 + the signal that ended it. SIGTERM ends everything. On Linux, a
child that has left the program's process group, or whose parent has exited, is reparented to this process, which ends
it. Since Linux 6.12 with Landlock, the program can signal or inspect only processes that it has started. No module of
the package is imported: the script runs in an isolated interpreter.
"""

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 36, 4, 24, 38
#: the same numbers on every architecture
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
LANDLOCK_ABI_WITH_SCOPES, SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 6, 1, 2


def run(limits: list[int], program: str, arguments: list[str]) -> None:
    """Run the program in this process under its limits."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if sys.platform == "linux":
        restrict_scope()
    for kind, limit in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE), limits):
        if limit >= 0:
            resource.setrlimit(kind, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = [program, *arguments]
    sys.path.insert(0, "")
    runpy.run_path(program, run_name="__main__")


def adopt_orphans() -> None:
    """Adopt orphans, and make the memory of this process and its forks inaccessible to other processes (Linux)."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Only root has these capabilities, which allow reading all memory. Processes started from here on lack them.
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def landlock_abi() -> int:
    """Return the Landlock version of the kernel; -1 if it is missing or disabled."""
    return ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)


def restrict_scope() -> None:
    """Forbid this process to signal or trace processes that it has not started (Linux 6.12)."""
    if landlock_abi() < LANDLOCK_ABI_WITH_SCOPES:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    scopes = (ctypes.c_uint64 * 3)(0, 0, SCOPE_SIGNAL | SCOPE_ABSTRACT_UNIX_SOCKET)  # no rule for files or the network
    rules = libc.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(scopes), ctypes.c_size_t(ctypes.sizeof(scopes)), 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if rules < 0 or libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "cannot isolate the program from other processes with Landlock")
    os.close(rules)


def wait_for(program: int) -> int:
    """Return the program's exit status, or -SIGTERM if this process receives SIGTERM."""
    while signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) != signal.SIGTERM:
        ended = -1
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == program:
                return os.waitstatus_to_exitcode(status)
    os.kill(program, signal.SIGKILL)
    return -signal.SIGTERM


def end_children() -> None:
    """Kill children until none is left: orphans are reparented to this process."""
    with contextlib.suppress(ChildProcessError):  # no children left
        while True:
            os.waitpid(-1, os.WNOHANG)
            for child in children():
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)


def children() -> list[int]:
    """Return the process ids of all children, zombies included."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has exited since
                _, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                found += [int(folder.name)] * (int(parent) == os.getpid())
    return found


def main() -> None:
    *limits, program = sys.argv[1:5]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    if sys.platform == "linux":
        adopt_orphans()
    child = os.fork()
    if child == 0:
        run([int(limit) for limit in limits], program, sys.argv[5:])
        return
    status = wait_for(child)
    if sys.platform == "linux":
        end_children()
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
