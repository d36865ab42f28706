"""The process above a program: sets its limits, waits for it, and leaves none of its children behind.

    python -I program_boot.py CPU_SECONDS MEMORY_BYTES OUTPUT_BYTES PROGRAM [ARGUMENT ...]      (-1: no limit)

Ends as the program does: with its exit status, or 128 + the signal that ended it. On SIGTERM all ends. On Linux a child
that has left the program's group, or whose parent is gone, comes to this process, which ends it too; and since 6.12,
where Landlock is on, the program can signal, or look into, no process but those that it has started. No module of the
package is imported: the script runs in an isolated interpreter.
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
    """The program, in this process, under its limits."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if sys.platform == "linux":
        stay_apart()
    for kind, limit in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE), limits):
        if limit >= 0:
            resource.setrlimit(kind, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = [program, *arguments]
    sys.path.insert(0, "")
    runpy.run_path(program, run_name="__main__")


def take_hold() -> None:
    """Orphans come to this process; its memory, and that of the fork below it, is closed to other processes (Linux)."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Root alone has these, and could read all memory: whatever is started from here on by exec has none of them.
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def landlock_abi() -> int:
    """The version of Landlock in this kernel; -1 where there is none, or where it is off."""
    return ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)


def stay_apart() -> None:
    """From here on no signal of this process, nor a debugger's look, reaches one that was there before (Linux 6.12)."""
    if landlock_abi() < LANDLOCK_ABI_WITH_SCOPES:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    scopes = (ctypes.c_uint64 * 3)(0, 0, SCOPE_SIGNAL | SCOPE_ABSTRACT_UNIX_SOCKET)  # no rule for files or the network
    rules = libc.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(scopes), ctypes.c_size_t(ctypes.sizeof(scopes)), 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if rules < 0 or libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "the program cannot be parted from other processes")
    os.close(rules)


def wait_for(program: int) -> int:
    """Its exit status; that of SIGTERM when this process is told to end."""
    while signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) != signal.SIGTERM:
        ended = -1
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == program:
                return os.waitstatus_to_exitcode(status)
    os.kill(program, signal.SIGKILL)
    return -signal.SIGTERM


def end_children() -> None:
    """Until none is left: children of those that end come to this process."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            os.waitpid(-1, os.WNOHANG)
            for child in children():
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)


def children() -> list[int]:
    """Those of this process, the ones that have ended too."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                _, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                found += [int(folder.name)] * (int(parent) == os.getpid())
    return found


def main() -> None:
    *limits, program = sys.argv[1:5]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    if sys.platform == "linux":
        take_hold()
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
