"""Runs a program in this process, after the process has given up the rights that the program does not need.

    python -I -S boot.py DESCRIPTOR [ARGUMENT...]

The descriptor is a file of JSON (see `program._specification`). The arguments become those of the program. No module of
the package is imported: the script runs in an isolated interpreter.

Under bubblewrap, namespaces and a filter of system calls confine the process already. Otherwise Landlock does: the
program reads the interpreter and the libraries of the system ("readable"), and writes to its working folder. A
supervisor, the parent of the program, adopts the processes that it leaves, and ends them with the program, or when it
receives SIGTERM.
"""

import base64
import contextlib
import ctypes
import functools
import json
import os
import resource
import runpy
import signal
import site
import struct
import sys
import time
import types
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 22, 24, 36
PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 38, 2
#: the same numbers on every architecture
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_ABI_WITH_SCOPES = 6
#: rights to files by the Landlock version that introduced them: 13 in version 1, then refer, truncate, ioctl_dev
FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK = (1 << n for n in (0, 1, 2, 3, 6, 9, 11))
REFER = FILE_RIGHTS[2]
RIGHTS_TO_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | FILE_RIGHTS[3] | FILE_RIGHTS[5]
BIND_OR_CONNECT_TCP, SCOPE_ABSTRACT_UNIX_SOCKETS, SCOPE_SIGNALS = 3, 1, 2
#: what a program reads of /proc/self; net, also that of each task, shows the connections of the host
OF_ITSELF = ("cmdline", "comm", "environ", "exe", "fd", "fdinfo", "io", "limits", "maps", "stat", "statm", "status")
#: the kernel does not limit the number of root's processes: they must not stop those that measure and end them
NICE_OF_ROOT = 10


def landlock_abi() -> int:
    """Return the Landlock version of the kernel; -1 if it is missing or disabled."""
    return ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, 1) if sys.platform == "linux" else -1


def restrict_files(libc: ctypes.CDLL, abi: int, readable: list[str]) -> None:
    """Allow reading `readable`, and writing to the current folder. From version 4 on: no TCP; from version 6 on: no
    signals to processes outside, and no tracing of them."""
    rights = sum(bits for since, bits in FILE_RIGHTS.items() if since <= abi)
    handled = [rights]
    handled += [BIND_OR_CONNECT_TCP] if abi >= 4 else []
    handled += [SCOPE_ABSTRACT_UNIX_SOCKETS | SCOPE_SIGNALS] if abi >= LANDLOCK_ABI_WITH_SCOPES else []
    allowed = dict.fromkeys([*readable, *(f"/proc/self/{name}" for name in OF_ITSELF)], EXECUTE | READ_FILE | READ_DIR)
    allowed |= {"/dev/null": READ_FILE | WRITE_FILE, ".": rights & ~(MAKE_CHAR | MAKE_BLOCK | MAKE_SOCK)}
    enter_domain(libc, handled, allowed)


def enter_domain(libc: ctypes.CDLL, handled: list[int], allowed: dict[str, int]) -> None:
    """Create a domain of Landlock for this process and its children.

    Args:
        handled: What it restricts: rights to files, of TCP, and scopes.
        allowed: Path -> rights to files that it grants.
    """
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    rules = libc.syscall(
        LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0
    )
    for path, rights in allowed.items():
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights &= handled[0] if os.path.isdir(path) else handled[0] & RIGHTS_TO_A_FILE
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
            if libc.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0):
                raise OSError(ctypes.get_errno(), f"cannot restrict the program's access to files: {path}")
            os.close(descriptor)
    if rules < 0 or libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "cannot isolate the program from files and processes with Landlock")
    os.close(rules)


def confine(readable: list[str], call_filter: bytes) -> None:
    """Drop rights of this process, for good (Linux). call_filter: a program of seccomp; empty: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.nice(0 if os.getuid() else NICE_OF_ROOT)
    if landlock_abi() > 0:
        restrict_files(libc, landlock_abi(), readable)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # the run can measure it; other programs cannot read it
    # effective, permitted and inheritable capabilities of root; version 3 of the call
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    if call_filter:
        code = ctypes.create_string_buffer(call_filter, len(call_filter))
        program = ctypes.create_string_buffer(struct.pack("@HP", len(call_filter) // 8, ctypes.addressof(code)))
        if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
            raise OSError(ctypes.get_errno(), "cannot filter the system calls of the program")


def empty_finder(folder: str, path: str) -> types.SimpleNamespace:
    """A path hook: a finder that finds no module in a folder. Raises ImportError for other paths."""
    if os.path.commonpath([folder, os.path.realpath(path)]) != folder:
        raise ImportError(path)
    return types.SimpleNamespace(find_spec=lambda name, target=None: None)


def run(settings: dict[str, Any]) -> None:
    """Run the program in this process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for name, limit in settings["resources"].items():
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1] % (1 << 63)  # -1: no limit
        resource.setrlimit(kind, (min(limit, most), min(limit + (name == "RLIMIT_CPU"), most)))  # SIGXCPU, then SIGKILL
    sys.argv = ["program.py", *sys.argv[2:]]
    sys.path += settings["packages"]
    site.setquit()
    site.sethelper()
    if settings["is_alone"]:
        sys.path.insert(0, "")
        with open("program.py", "w", encoding="utf-8", errors="replace") as file:
            file.write(settings["program"])
    if sys.platform == "linux" and "readable" in settings:
        confine(settings["readable"], base64.b64decode(settings["call_filter"]))
    if settings["is_alone"]:
        runpy.run_path("program.py", run_name="__main__")
    else:  # no file and no import from a folder that another program writes to, whatever is added to sys.path
        sys.path_hooks.insert(0, functools.partial(empty_finder, os.path.realpath(".")))
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(settings["program"], "program.py", "exec"), vars(module))


def become_supervisor() -> None:
    """Adopt orphans, end with the parent, and make the memory of this process and its forks inaccessible (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Only root has these capabilities, which allow reading all memory. Processes started from here on lack them.
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if landlock_abi() >= LANDLOCK_ABI_WITH_SCOPES:  # for `end_children`
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        enter_domain(libc, [REFER, 0, SCOPE_SIGNALS], {"/": REFER})  # otherwise it would refuse to move files


def wait_for(program: int) -> int:
    """Return the program's exit status; -SIGTERM if this process receives SIGTERM."""
    while signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGCHLD:
        ended = -1
        while ended and ended != program:
            ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            return os.waitstatus_to_exitcode(status)
    os.kill(program, signal.SIGKILL)
    return -signal.SIGTERM


def end_children() -> None:
    """Kill all processes below this one until none is left: orphans are reparented to this process.

    Processes that fork faster than they are listed end all at once, if Landlock restricts -1 to this domain.
    """
    with contextlib.suppress(ChildProcessError):  # no children left
        while True:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            processes = [-1]
            if landlock_abi() < LANDLOCK_ABI_WITH_SCOPES:
                with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
                    processes = [int(pid) for pid in file.read().split()]
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # it has exited since
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.001)


def main() -> None:
    with open(int(sys.argv[1]), "rb") as file:
        settings = json.load(file)
    if "readable" not in settings:  # under bubblewrap, whose process outside is in the group that it starts in
        os.setpgid(0, 0)
        return run(settings)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    if sys.platform == "linux":
        become_supervisor()
    child = os.fork()
    if child == 0:
        return run(settings)
    status = wait_for(child)
    if sys.platform == "linux":
        end_children()
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
