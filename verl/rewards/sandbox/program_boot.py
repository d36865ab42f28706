"""The supervisor of a program: sets its limits, waits for it, and ends all its child processes.

    python -I program_boot.py CPU_SECONDS MEMORY_BYTES OUTPUT_BYTES HAS_SHARED_MEMORY PROGRAM
    python -I program_boot.py                 fails if the system does not allow HAS_SHARED_MEMORY=1

-1: no limit.
Exits like the program: with its exit status, or 128 + the signal that ended it. SIGTERM ends everything. No module of
the package is imported: the script runs in an isolated interpreter. On Linux,

- a child that has left the program's process group, or whose parent has exited, is reparented to this process, which
  ends it.
- the memory of the program and all its children together is limited, and their number.
- with HAS_SHARED_MEMORY=1, it has a private /dev/shm, for locks, queues and shared memory of `multiprocessing`, and its
  working folder is there, with a copy of the program. The system must allow mounts: as root, or with user namespaces.
  Otherwise it has no /dev/shm, and runs in the current folder, whose size is measured.
- the program can read the interpreter, its packages and the system's libraries, and write to its own folder (Landlock,
  Linux 5.13).
- it has no network and no other sockets, except pairs between its own processes (seccomp).
- it can signal or inspect only processes that it has started (Landlock, Linux 6.12).
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import runpy
import signal
import stat
import struct
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 36, 4, 24, 38, 22
#: the same numbers on every architecture
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_ABI_WITH_SCOPES, SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 6, 1, 2
#: rights to files by the Landlock version that introduced them: 13 in version 1, then refer, truncate, ioctl_dev
FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK = (1 << n for n in (0, 1, 2, 3, 6, 9, 11))
RIGHTS_TO_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | FILE_RIGHTS[3] | FILE_RIGHTS[5]
BIND_OR_CONNECT_TCP = 3

#: paths that a program can read besides the interpreter and its packages
READABLE = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/etc/alternatives", "/etc/localtime"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/timezone", "/sys/devices/system/cpu"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm/overcommit_memory"),
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)

#: machine -> its number in seccomp, and its numbers of the system calls socket, io_uring_setup (which makes sockets,
#: too), shmget, msgget, semget, memfd_create (memory that belongs to no process), ptrace, unshare, setns, add_key,
#: request_key, keyctl, bpf, perf_event_open, userfaultfd, memfd_secret, fallocate (space of the disk that is not in the
#: size of a file, such as stdout)
REFUSED_CALLS = {
    "x86_64": (0xC000003E, (41, 425, 29, 68, 64, 319, 101, 272, 308, 248, 249, 250, 321, 298, 323, 447, 285)),
    "aarch64": (0xC00000B7, (198, 425, 194, 186, 190, 279, 117, 97, 268, 217, 218, 219, 280, 241, 282, 447, 47)),
}
#: system calls of the x32 variant of x86_64 start here
X32_CALLS = 0x40000000

#: of unshare() and mount()
CLONE_NEWNS, CLONE_NEWUSER, MS_NOSUID, MS_NODEV, MS_REC, MS_SLAVE = 1 << 17, 1 << 28, 1 << 1, 1 << 2, 1 << 14, 1 << 19
SHARED_MEMORY = "/dev/shm"

#: seconds between two measurements of the memory and of the files
MEASURE_SECONDS = 0.05
#: processes of one program at the same time
MOST_PROCESSES = 256
#: files and folders of one program; their bytes are at most half of the memory limit
MOST_FILES = 4096


def run(limits: list[int], program: str, has_shared_memory: bool) -> None:
    """Run the program in this process under its limits."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if sys.platform == "linux":
        confine([SHARED_MEMORY] if has_shared_memory else [])
    cpu, memory, output = limits
    if has_shared_memory:  # shared memory is a file; the supervisor measures the output
        output = memory
    resources = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    for name, limit in zip(resources, (cpu, memory, output)):
        if limit >= 0:
            resource.setrlimit(name, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ |= {"HOME": os.getcwd(), "TMPDIR": os.getcwd()}
    sys.argv = [program]
    sys.path.insert(0, "")
    runpy.run_path(program, run_name="__main__")


def mount_shared_memory(most_bytes: int) -> None:
    """Give this process and its children an empty /dev/shm of at most that many bytes (-1: no limit) that no other
    process sees. Raises OSError if the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS):  # not root
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "no user namespaces")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="ascii")
    options = f"mode=700,nr_inodes={MOST_FILES}" + ("" if most_bytes < 0 else f",size={most_bytes}")
    if libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None) or libc.mount(
        b"tmpfs", SHARED_MEMORY.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode()
    ):
        raise OSError(ctypes.get_errno(), f"cannot mount {SHARED_MEMORY}")


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


def can_filter_calls() -> bool:
    """Whether this kernel filters system calls (seccomp), and their numbers are known here."""
    return platform.machine() in REFUSED_CALLS and Path("/proc/sys/kernel/seccomp/actions_avail").is_file()


def confine(writable: list[str]) -> None:
    """Drop the rights of this process that a program does not need, for good (Linux), as far as the kernel can.
    writable: folders besides the current one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if landlock_abi() > 0:
        restrict_files(libc, landlock_abi(), writable)
    # effective, permitted and inheritable capabilities of root; version 3 of the call
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    if can_filter_calls():
        refuse_calls(libc, *REFUSED_CALLS[platform.machine()])


def restrict_files(libc: ctypes.CDLL, abi: int, writable: list[str]) -> None:
    """Allow reading the interpreter and libraries, and writing to this folder and `writable` only. From version 4 on:
    no TCP; from version 6 on: no signals to processes outside, and no tracing of them."""
    rights = sum(bits for since, bits in FILE_RIGHTS.items() if since <= abi)
    handled = [rights]
    if abi >= 4:
        handled.append(BIND_OR_CONNECT_TCP)
    if abi >= LANDLOCK_ABI_WITH_SCOPES:
        handled.append(SCOPE_SIGNAL | SCOPE_ABSTRACT_UNIX_SOCKET)
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    rules = libc.syscall(
        LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0
    )
    readable = dict.fromkeys(READABLE, EXECUTE | READ_FILE | READ_DIR)
    readable |= dict.fromkeys(interpreter_folders(), EXECUTE | READ_FILE | READ_DIR)
    readable["/dev/null"] = READ_FILE | WRITE_FILE
    readable |= dict.fromkeys([".", *writable], rights & ~(MAKE_CHAR | MAKE_BLOCK | MAKE_SOCK))
    for path, allowed in readable.items():
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed &= rights if os.path.isdir(path) else rights & RIGHTS_TO_A_FILE
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor), 12)
            if libc.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0):
                raise OSError(ctypes.get_errno(), f"cannot restrict the program's access to files: {path}")
            os.close(descriptor)
    if rules < 0 or libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "cannot isolate the program from files and processes with Landlock")
    os.close(rules)


def interpreter_folders() -> set[str]:
    """The folders of this interpreter, its standard library and its packages."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return folders | {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parent)}


def refuse_calls(libc: ctypes.CDLL, machine: int, calls: tuple[int, ...]) -> None:
    """Let these system calls fail with EPERM, and all calls of another architecture."""
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    steps = [(load, 4), (equal, machine), (load, 0), (at_least, X32_CALLS), *((equal, number) for number in calls)]
    # a jump to `refuse` skips the remaining steps and `allow`
    jumps = [(0, 0), (0, len(steps) - 1), (0, 0), *((len(steps) - position, 0) for position in range(3, len(steps)))]
    program = [(opcode, *jump, value) for (opcode, value), jump in zip(steps, jumps)]
    program += [(end, 0, 0, allow), (end, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    filters = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    if libc.prctl(PR_SET_SECCOMP, 2, filters, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot take the network from the program with seccomp")


def wait_for(program: int, limits: list[int], has_shared_memory: bool) -> int:
    """Return the program's exit status; -SIGTERM if this process receives SIGTERM, -SIGKILL if all processes together
    exceed a limit."""
    _, memory, output = limits
    unreadable = 0
    while True:
        info = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, MEASURE_SECONDS)
        if info is not None and info.si_signo == signal.SIGTERM:
            os.kill(program, signal.SIGKILL)
            return -signal.SIGTERM
        ended = -1
        while ended and ended != program:
            ended, status = os.waitpid(-1, os.WNOHANG)
        excess = None
        if has_shared_memory and max(os.fstat(1).st_size, os.fstat(2).st_size) > output >= 0:
            excess = f"printed more than {output} bytes"
        elif ended != program and sys.platform == "linux":
            excess = exceeded_limit(list(descendants()), memory, has_shared_memory)
        if excess is None and ended != program and not has_shared_memory:
            try:
                excess, unreadable = exceeded_file_limit(".", memory), 0
            except PermissionError:
                unreadable += 1
                excess = "made folders that cannot be measured" if unreadable > 1 else None
        if excess is not None:
            if ended != program:  # otherwise its number may be that of another process
                os.kill(program, signal.SIGKILL)
            print(f"the program and its child processes {excess}", file=sys.stderr)
            return -signal.SIGKILL
        if ended == program:
            return os.waitstatus_to_exitcode(status)


def exceeded_limit(processes: list[int], memory: int, has_shared_memory: bool) -> str | None:
    """The limit that processes exceed together, as a predicate. memory: in bytes; -1: no limit."""
    if len(processes) > MOST_PROCESSES:
        return f"were more than {MOST_PROCESSES} processes"
    if memory < 0:
        return None
    used = used_memory(processes)
    if has_shared_memory:
        mounted = os.statvfs(SHARED_MEMORY)
        used += (mounted.f_blocks - mounted.f_bfree) * mounted.f_frsize
    return f"used more than {memory >> 20} MiB together" if used > memory else None


def exceeded_file_limit(folder: str, memory: int) -> str | None:
    """The limit that the files in a folder exceed together, as a predicate. memory: in bytes; -1: no limit.

    Raises:
        PermissionError: a folder cannot be read.
    """
    count, size, folders = 0, 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    count, size = count + 1, size + info.st_blocks * 512
                    if stat.S_ISDIR(info.st_mode):
                        folders.append(entry.path)
                    if count > MOST_FILES:
                        return f"made more than {MOST_FILES} files"
        except (FileNotFoundError, NotADirectoryError):  # removed since
            continue
        except OSError as error:  # its path is too long
            raise PermissionError from error
    return f"wrote more than {memory // 2 >> 20} MiB to files" if size > memory // 2 >= 0 else None


def descendants() -> Iterator[int]:
    """The process ids of the program and of everything that it has started."""
    pids = children(os.getpid())
    while pids:
        yield (pid := pids.pop())
        pids += children(pid)


def used_memory(processes: Iterable[int]) -> int:
    """Bytes of memory that processes use together, in RAM and swap. Files of the disk do not count.

    Pages that processes share since a fork count once if the kernel says so (PSS), otherwise once for each process.
    """
    total = 0
    for pid in processes:
        with contextlib.suppress(OSError):  # it has exited since
            try:
                total += _kilobytes(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
            except PermissionError:
                total += _kilobytes(pid, "status", ("RssAnon:", "RssShmem:", "VmSwap:"))
    return total << 10


def _kilobytes(pid: int, file: str, names: tuple[str, ...]) -> int:
    # the name of the process may contain other line breaks than \n, and any byte
    lines = Path(f"/proc/{pid}/{file}").read_text(encoding="latin-1").split("\n")
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))


def end_children() -> None:
    """Kill all processes below this one until none is left: orphans are reparented to this process."""
    with contextlib.suppress(ChildProcessError):  # no children left
        while True:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            for process in descendants():
                with contextlib.suppress(ProcessLookupError):  # it has exited since
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.001)


def children(parent: int) -> list[int]:
    """Return the process ids of all children of a process, zombies included."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # without CONFIG_PROC_CHILDREN, or it has exited
        return [
            int(pid)
            for file in Path(f"/proc/{parent}/task").iterdir()
            for pid in (file / "children").read_text(encoding="latin-1").split()
        ]
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has exited since
                _, ppid, *_ = (folder / "stat").read_text(encoding="latin-1").rpartition(")")[2].split()
                pids += [int(folder.name)] * (int(ppid) == parent)
    return pids


def main() -> None:
    if len(sys.argv) == 1:
        mount_shared_memory(-1)
        return
    cpu, memory, output, has_shared_memory = map(int, sys.argv[1:5])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    if has_shared_memory:
        code = Path(sys.argv[5]).read_bytes()
        mount_shared_memory(memory // 2)
        os.mkdir(f"{SHARED_MEMORY}/program")
        os.chdir(f"{SHARED_MEMORY}/program")
        Path(sys.argv[5]).write_bytes(code)
    if sys.platform == "linux":
        adopt_orphans()
    child = os.fork()
    if child == 0:
        run([cpu, memory, output], sys.argv[5], bool(has_shared_memory))
        return
    status = wait_for(child, [cpu, memory, output], bool(has_shared_memory))
    if sys.platform == "linux":
        end_children()
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
