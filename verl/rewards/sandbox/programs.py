"""Running a program in a process that can be killed, with limits on time, memory and output.

All processes that a program starts end with it, and share its memory limit. On Linux it has no network, reads only the
interpreter with its packages and the system's libraries, and writes only to a temporary folder (program_boot). Where
the kernel cannot enforce this, a warning names the missing protection. The kernel is shared: isolating a program that
attacks it needs a virtual machine.
"""

import contextlib
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from verl.rewards.sandbox.pool import Limits
from verl.rewards.sandbox.program_boot import LANDLOCK_ABI_WITH_SCOPES, can_filter_calls, landlock_abi

logger = logging.getLogger("verl.rewards")

_BOOT = Path(__file__).with_name("program_boot.py")
_SIGNALS = {number.value: number.name for number in signal.Signals}
#: time for the supervisor (program_boot) to end the processes that the program has left
_SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class Finished:
    """The result of a program.

    Attributes:
        failure: None if it exited with status 0, otherwise why not.
        stdout: Standard output, truncated at the limit.
        stderr: Standard error, truncated at the limit.
    """

    failure: str | None
    stdout: str
    stderr: str


@functools.cache
def warn_about_missing_isolation() -> None:
    """Log, once, what programs can do here that they should not."""
    on_linux = sys.platform == "linux"
    abi = landlock_abi() if on_linux else -1
    missing = {
        "read and write all files of this user": abi < 1,
        "use the network": not (on_linux and can_filter_calls()),
        "signal other processes of this user": abi < LANDLOCK_ABI_WITH_SCOPES,
        "exceed the memory limit": not on_linux,
    }
    if any(missing.values()):
        logger.warning(
            "programs in responses are run, and can %s: this kernel (%s) cannot prevent it. Run the training in a "
            "container, or on Linux 6.12 or later with Landlock and seccomp (docs/security.md)",
            ", ".join(name for name, is_missing in missing.items() if is_missing),
            " ".join((os.uname().sysname, os.uname().release)),
        )
    if on_linux and not has_shared_memory():
        logger.warning(
            "programs in responses cannot use locks, queues, pools and shared memory of multiprocessing, and fail if "
            "they do: this system allows no private /dev/shm. Run the training as root, or allow user namespaces "
            "(docs/security.md)"
        )


@functools.cache
def has_shared_memory() -> bool:
    """Whether programs can have a private /dev/shm here."""
    return (
        sys.platform == "linux"
        and not subprocess.run([sys.executable, "-I", str(_BOOT)], stderr=subprocess.DEVNULL, check=False).returncode
    )


def run_program(code: str, *, limits: Limits, stdin: str = "") -> Finished:
    """Run Python `code` as a script in a temporary folder, with this interpreter and without its environment.

    All processes started by the program are ended with it.

    Args:
        code: The source of the script.
        limits: Limits on time, memory and output.
        stdin: Text for standard input.
    """
    warn_about_missing_isolation()
    folder = tempfile.mkdtemp(prefix="program-")
    try:
        Path(folder, "program.py").write_text(code, encoding="utf-8", errors="replace")
        with (
            _read_only(stdin.encode(errors="replace")) as stdin_file,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
        ):
            failure = _run(folder, stdin_file, stdout, stderr, limits)
            outputs = [os.pread(file.fileno(), limits.output_bytes, 0) for file in (stdout, stderr)]
            return Finished(failure, *(output.decode("utf-8", errors="replace") for output in outputs))
    finally:
        _remove(folder)


def _run(folder: str, stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO, limits: Limits) -> str | None:
    bounds = (
        -1 if limits.cpu_seconds is None else int(limits.cpu_seconds) + 1,
        # Address space; only Linux has a limit that programs survive.
        -1 if limits.memory_bytes is None or sys.platform != "linux" else limits.memory_bytes,
        limits.output_bytes,
        int(has_shared_memory()),
    )
    command = [sys.executable, "-I", str(_BOOT), *map(str, bounds), "program.py"]
    environment = {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        status = process.wait(limits.wall_seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        process.terminate()  # the supervisor, which ends the processes below it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError):  # no process of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status is None:
        return f"did not end within {limits.wall_seconds:g} s"
    if status == 128 + signal.SIGXCPU:
        return f"used more than {limits.cpu_seconds:g} s of processor time"
    if status == 0:
        return None
    return f"ended by {_SIGNALS[status - 128]}" if status - 128 in _SIGNALS else f"ended with exit status {status}"


def _read_only(content: bytes) -> BinaryIO:
    """A file without a name that cannot be written to, outside of the program's folder."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return open(file.name, "rb")


def _remove(folder: str) -> None:
    """Remove a folder of any depth and permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):
        for command in (["chmod", "-R", "u+rwX", folder], ["rm", "-rf", folder]):
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
