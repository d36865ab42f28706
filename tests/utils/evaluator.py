"""A program of tests: evaluates expressions that arrive through a connection."""

import atexit  # noqa: F401  for expressions
import os
import resource
import signal
import subprocess  # noqa: F401  for expressions
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path


def facts() -> dict:
    """What a program can find out about its process, and what is equal for all processes with the same parent."""
    status = Path("/proc/self/status").read_text().splitlines()
    masks = [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt", "Umask", "Threads"))]
    main = sys.modules["__main__"]
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "arguments": (sys.argv[0], len(sys.argv)),
        "import path": sys.path,
        "main": (main.__file__, main.__spec__.name, callable(main.main)),
        "signals": masks,
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "own session": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "stdin": os.readlink("/proc/self/fd/0"),
        "descriptors": sorted(Path(f"/proc/self/fd/{n}").resolve().name.split(":")[0] for n in own_descriptors()),
        "inheritable": [os.get_inheritable(n) for n in (0, 1, 2)],
        "output": (sys.stdout.line_buffering, sys.stdout.encoding, sys.stderr.line_buffering),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "main thread": threading.current_thread() is threading.main_thread(),
    }


def own_descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}") and int(name) > 2]


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    try:
        while True:
            connection.send(eval(connection.recv()))
    except EOFError:
        print("done")


if __name__ == "__main__":
    main()
