"""One run at a time in a folder: a lock that the system takes back when the process ends, however it ends."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = ".in_use"
#: of file systems that know no locks
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class InUseError(ValueError):
    """Another run works in the folder; the message names it."""


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """The folder is this run's while the block lasts; it is made where it is not there.

    Raises InUseError where it is another's. The lock is on the file `.in_use`, which is gone afterwards; one that a
    killed run leaves behind is not locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    descriptor = _locked(path)
    try:
        os.truncate(descriptor, 0)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {now}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int:
    """The open file, locked, and still the one that has this name: its last owner may just have removed it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(descriptor, path):
                return descriptor
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise InUseError(
                f"another run is at work in {path.parent} ({owner}): wait for its end, or stop it, or give this one a "
                "folder of its own (trainer.default_local_dir)"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s is on a file system without locks: take care that no other run uses it", path.parent)
            return descriptor
        os.close(descriptor)


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
