"""Heartbeats of the processes of this host: each writes the time into a file, which the controller reads.

The time is that of `time.monotonic`, which all processes of a host share.
"""

import os
import struct
import tempfile
import threading
import time

from verl.processes.limits import HEARTBEAT_SECONDS

_TIME = struct.Struct("d")


class Heartbeat:
    """The controller's side of the heartbeat of one process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        os.pwrite(self.fileno(), _TIME.pack(0.0), 0)

    def fileno(self) -> int:
        """The file descriptor for `start_heartbeat` in the process."""
        return self._file.fileno()

    def silence(self) -> float | None:
        """Seconds since the last heartbeat; None before the first one."""
        (last,) = _TIME.unpack(os.pread(self.fileno(), _TIME.size, 0))
        return max(0.0, time.monotonic() - last) if last else None

    def close(self) -> None:
        self._file.close()


def start_heartbeat(descriptor: int) -> None:
    """In a process: write the time every second, from a thread."""

    def beat() -> None:
        while True:
            os.pwrite(descriptor, _TIME.pack(time.monotonic()), 0)
            time.sleep(HEARTBEAT_SECONDS)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
