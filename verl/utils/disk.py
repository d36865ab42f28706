"""The cache folder, and errors of a disk that is full or not writable: detected in any library, with the fix."""

import errno
import fcntl
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: no space left; quota exceeded; larger than `ulimit -f` or the file system allows
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: not permitted, read-only (also after an error of the disk), input/output error, lost network file system
_REFUSED = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE)
_PROBE = 1 << 20  # bytes


def cache_folder() -> Path:
    """VERL_CACHE_DIR; by default verl/ in XDG_CACHE_HOME or in ~/.cache. It may not exist."""
    folder = os.environ.get("VERL_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "verl"
    return Path(os.path.expanduser(folder))


def file_sizes(folder: Path) -> dict[str, int]:
    """Relative path -> bytes of the files below a folder; empty if there is no such folder."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


class DiskError(OSError):
    """A file cannot be written. The message names the file, the reason and the fix."""


class DiskFullError(DiskError):
    """No space left for a file. The message names the file, the folder, the free space and the fix."""


def disk_full_reason(error: BaseException, folder: Path) -> str | None:
    """The system's message if `error` was caused by a full disk, otherwise None. torch and safetensors raise "file
    write failed" without the reason, and errors of other processes are text: this tries another small write into
    `folder`. Call it before the incomplete files are removed."""
    if (cause := _cause(error, _NO_SPACE, folder)) is not None:
        return os.strerror(cause.errno)
    probe = folder / ".disk_probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as probed:
        return os.strerror(probed.errno) if probed.errno in _NO_SPACE else None
    finally:
        with suppress(OSError):  # missing, or the disk refuses this, too
            probe.unlink()
    return None


def refusal(error: BaseException, folder: Path) -> OSError | None:
    """Return the error of the system, among `error` and its causes, that says that `folder` may not be written."""
    return _cause(error, _REFUSED, folder)


def _cause(error: BaseException, numbers: tuple[int, ...], folder: Path) -> OSError | None:
    candidate: BaseException | None = error
    while candidate is not None:
        if isinstance(candidate, OSError) and candidate.errno in numbers and _concerns(candidate, folder):
            return candidate
        candidate = candidate.__cause__ or candidate.__context__
    return None


def _concerns(error: OSError, folder: Path) -> bool:
    """Whether an error names no file, or `folder`, something in it (also in a link there) or a folder above it."""
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str | bytes | os.PathLike)]
    for resolved in (os.path.abspath, os.path.realpath):
        root = Path(resolved(folder))
        paths = [Path(resolved(os.fsdecode(name))) for name in names]
        if any(path.is_relative_to(root) or root.is_relative_to(path) for path in paths):
            return True
    return not names


def disk_full(file: str, folder: Path, reason: str, advice: str) -> DiskFullError:
    """Return the error for a file, which did not fit into `folder`. advice: a sentence."""
    free = format_bytes(shutil.disk_usage(folder).free)
    return DiskFullError(f"no space left for {file} in {folder} ({reason}; {free} free). {advice}")


@contextmanager
def raise_disk_full(file: str, folder: Path, advice: str) -> Iterator[None]:
    """Convert the error of a full disk in the block into DiskFullError. `folder` must exist by then."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise disk_full(file, folder, os.strerror(error.errno), advice) from error


def format_bytes(size: int) -> str:
    """12.3 GiB, 640 KiB."""
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if size >= 1 << bits:
            return f"{size / (1 << bits):.1f} {unit}"
    return f"{size / 1024:.0f} KiB"


def folder_size(folder: Path) -> int:
    """Total bytes of the files in a folder."""
    return sum(file_sizes(folder).values())


# ---- the lock of a folder -------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

NAME = ".in_use"
#: errors of file systems without locks
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class InUseError(ValueError):
    """Another run uses the folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs, by the file `.in_use`, which is removed afterwards; that of a killed run is
    not locked. Creates the folder if needed. Raises InUseError if another run has locked it."""
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
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
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
