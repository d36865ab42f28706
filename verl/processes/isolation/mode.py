"""How programs are isolated on this machine: the command that starts one, and what is weaker than it could be.

The table of allowed system calls, system_calls.yaml, is compiled with libseccomp, which knows their numbers.
"""

import base64
import ctypes
import errno
import functools
import json
import logging
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl.processes.isolation.boot import LANDLOCK_ABI_WITH_SCOPES, NICE_OF_ROOT, landlock_abi

logger = logging.getLogger("verl.rewards")

_BOOT = Path(__file__).with_name("boot.py")
_CALLS = Path(__file__).with_name("system_calls.yaml")
#: paths that a program can read besides the interpreter and its packages
_READABLE = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/etc/alternatives", "/etc/localtime"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/timezone", "/sys/devices/system/cpu"),
)
#: the same without a mount namespace, where /proc and /dev are those of the host
_READABLE_OF_HOST = (
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm/overcommit_memory"),
    *("/dev/full", "/dev/random", "/dev/urandom"),
)
#: under bubblewrap the working folder is a part of it, so that the size of one file system limits both
SHARED_MEMORY = "/dev/shm"
_FOLDER = f"{SHARED_MEMORY}/program"
_NAMESPACES = (
    "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try "
    "--uid 65534 --gid 65534 --hostname sandbox --die-with-parent --proc /proc"
)
_DEVICES = ("null", "full", "random", "urandom")
_LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "fd/0", "/dev/stdout": "fd/1", "/dev/stderr": "fd/2"}
# /dev/full reads as /dev/zero does, a shared mapping of which would be memory that no process shows
_LINKS |= {"/tmp": _FOLDER, "/dev/zero": "full"}
#: folders of an interpreter, which a project may share with it
_PARTS = ("bin", "etc", "include", "lib", "lib32", "lib64", "libexec", "pyvenv.cfg", "share", "ssl")


@dataclass(frozen=True)
class Isolation:
    """A way to isolate programs.

    Attributes:
        bubblewrap: The command; None: by Landlock, seccomp and resource limits, as far as the kernel has them.
        problem: Why bubblewrap cannot be used.
    """

    bubblewrap: str | None = None
    problem: str = ""

    @property
    def weaker(self) -> tuple[str, ...]:
        """What programs can do that they should not, as predicates."""
        outside, abi, unfiltered = self.bubblewrap is None, landlock_abi(), not self.call_filter()
        possible = {
            "read and write all files of this user": outside and abi < 1,
            "use the network and change the limits of this user's processes": outside and unfiltered,
            "signal this user's processes": outside and unfiltered and abi < LANDLOCK_ABI_WITH_SCOPES,
            "use all system calls": unfiltered,
            "see names and times of files": outside,
            "write up to half of their memory limit to the disk": outside,
            "exceed the memory limit": sys.platform != "linux",
        }
        return tuple(predicate for predicate, applies in possible.items() if applies)

    def describe(self) -> str:
        """The mode, and what is weaker in it."""
        parts = ["bubblewrap"] if self.bubblewrap else ["Landlock"] * (landlock_abi() > 0)
        name = " and ".join([*parts, *["seccomp"] * bool(self.call_filter())]) or "resource limits"
        causes = [] if self.bubblewrap else [f"without bubblewrap ({self.problem})"]
        causes += [] if self.call_filter() else ["without seccomp (the library libseccomp2)"]
        lacks = "" if self.bubblewrap else ", and have no locks, pools and queues of multiprocessing"
        return f"{name}; {' and '.join(causes)}, programs can {', '.join(self.weaker)}{lacks}" if causes else name

    def call_filter(self, is_alone: bool = True) -> bytes:
        """The seccomp filter of a program; empty if none is possible. is_alone: without a peer."""
        if not Path("/proc/sys/kernel/seccomp/actions_avail").is_file():
            return b""
        is_private = self.bubblewrap is not None
        return compile_filter(is_private or landlock_abi() >= LANDLOCK_ABI_WITH_SCOPES, is_private and is_alone)

    def settings(self, code: str, resources: dict[str, int], is_alone: bool) -> bytes:
        """What boot.py reads.

        Args:
            code: The program.
            resources: Limits by their names in the module `resource`.
            is_alone: Whether the working folder is that of this program alone, so that it can import from it.
        """
        values = {
            "program": code,
            "is_alone": is_alone,
            "resources": resources,
            "packages": sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")}),
        }
        if self.bubblewrap is None:
            values["readable"] = [*_READABLE, *_READABLE_OF_HOST, *_interpreter_folders()]
            values["call_filter"] = base64.b64encode(self.call_filter(is_alone)).decode()
        return json.dumps(values).encode()

    def command(self, folder: str | None, most_bytes: int, info: int, call_filter: int) -> list[str]:
        """The command that starts boot.py.

        Args:
            folder: The working folder; None: in memory, which bubblewrap can create.
            most_bytes: Of files in memory.
            info, call_filter: Descriptors that bubblewrap writes to and reads.
        """
        python = [sys.executable, "-I", "-S"]
        if self.bubblewrap is None:
            return [*python, str(_BOOT)]
        options = [*_NAMESPACES.split(), "--info-fd", str(info)]
        options += ["--seccomp", str(call_filter)] if self.call_filter() else []
        for path in (*_READABLE, *_interpreter_folders()):
            options += ["--ro-bind-try", path, path]
        for device in _DEVICES:
            options += ["--dev-bind-try", f"/dev/{device}", f"/dev/{device}"]
        options += ["--size", str(most_bytes), "--tmpfs", SHARED_MEMORY]
        options += ["--dir", _FOLDER] if folder is None else ["--bind", folder, _FOLDER]
        for link, target in _LINKS.items():
            is_free = not any(path.startswith(f"{link}/") for path in _interpreter_folders())
            options += ["--symlink", target, link] if is_free else []
        options += ["--ro-bind", str(_BOOT), "/boot.py", "--chdir", _FOLDER]
        options += ["--remount-ro", "/proc", "--remount-ro", "/"]
        lower_priority = [] if os.getuid() else ["nice", "-n", str(NICE_OF_ROOT)]
        return [*lower_priority, self.bubblewrap, *options, "--", *python, "/boot.py"]

    def environment(self, folder: str | None) -> dict[str, str]:
        """The environment of a program. folder: its working folder; None: in memory."""
        names = dict.fromkeys(("HOME", "TMPDIR", "PWD"), _FOLDER if self.bubblewrap else folder)
        return {**names, "PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@functools.cache
def _interpreter_folders() -> list[str]:
    """The folders of this interpreter, its standard library and its packages."""
    paths, executables = sysconfig.get_paths(), {Path(sys.executable), Path(sys.executable).resolve()}
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    folders |= {f"{prefix}/{name}" for prefix in prefixes for name in _PARTS if os.path.exists(f"{prefix}/{name}")}
    return sorted(folders | {str(path) for path in executables if str(path.parent) not in folders})


# ---- system calls ----------------------------------------------------------------------------------------------------

_ALLOW, _FAIL = 0x7FFF0000, 0x00050000  # the second with an error number; 0: the call succeeds without an effect
_EQUAL, _MASKED_EQUAL = 4, 7


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp"""

    _fields_ = (("argument", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


@functools.cache
def compile_filter(signals: bool, attributes: bool) -> bytes:
    """A seccomp program for the kernel; empty if the library libseccomp is missing.

    Args:
        signals: Whether signals can be sent: something else restricts them to the program's processes.
        attributes: Whether mode and times of files can be changed; otherwise these calls have no effect.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return b""
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_FAIL | errno.EPERM)))

    def add(names: str, action: int, *condition: int) -> None:
        comparisons = [_comparison(condition[i : i + 3]) for i in range(0, len(condition), 3)]
        array = (_Comparison * len(comparisons))(*comparisons)
        for name in names.split():
            number = library.seccomp_syscall_resolve_name(name.encode())
            arguments = (rules, ctypes.c_uint32(action), number, len(comparisons), array)
            if number >= 0 and (error := library.seccomp_rule_add_array(*arguments)):  # < 0: not of this architecture
                raise OSError(-error, f"libseccomp refuses the rule for {name}")

    table = yaml.safe_load(_CALLS.read_text(encoding="utf-8"))
    add(" ".join([*table["allowed"].values(), table["signals_to_others"] if signals else ""]), _ALLOW)
    add(table["attributes"], _ALLOW if attributes else _FAIL)
    add(table["missing"], _FAIL | errno.ENOSYS)
    add(table["unsupported"], _FAIL | errno.EOPNOTSUPP)
    for name, conditions in table["conditions"].items():
        for condition in conditions:
            add(name, _ALLOW, *condition)
    with tempfile.TemporaryFile() as file:
        if error := library.seccomp_export_bpf(rules, file.fileno()):
            raise OSError(-error, "libseccomp cannot compile the filter of system calls")
        library.seccomp_release(rules)
        return os.pread(file.fileno(), 1 << 20, 0)


def _comparison(condition: Sequence[int]) -> _Comparison:
    argument, value, *mask = condition
    return _Comparison(argument, _MASKED_EQUAL, *mask, value) if mask else _Comparison(argument, _EQUAL, value, 0)
