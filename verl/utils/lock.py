"""A lock on a folder, so that one run at a time uses it. The system releases it when the process ends."""

import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = ".in_use"
#: errors of file systems without locks
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class InUseError(ValueError):
    """Another run uses the folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs. Creates the folder if needed.

    The lock is on the file `.in_use`, which is removed afterwards. The file of a killed run is not locked.

    Raises:
        InUseError: if another run has locked the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    descriptor = _open_locked(path)
    try:
        os.truncate(descriptor, 0)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {now}".encode())
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # must not hide an error of the block
            logger.warning("%s cannot be removed (%s); it does not lock the folder any more", path, error.strerror)
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    """Open and lock the file. Retries if its last owner has just removed it."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except IsADirectoryError:
            raise ValueError(f"{path} is a folder: expected the lock file of a run there; remove the folder") from None
        except OSError as error:
            actual = "a link" if path.is_symlink() else error.strerror
            raise ValueError(f"{path}: expected a lock file that can be written, found {actual}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError(f"{path} is not a regular file: expected the lock file of a run there; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, path):
                return descriptor
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise InUseError(
                f"another run is using {path.parent} ({owner}): wait for it to end, stop it, or set a different "
                "trainer.default_local_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s is on a file system without locks: make sure that no other run uses it", path.parent)
            return descriptor
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
