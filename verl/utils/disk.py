"""A full disk: found out whatever the library that was writing says of it, and told with numbers and a way on."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: no space left; a quota is used up; larger than `ulimit -f` or the file system allows
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PROBE = 1 << 20  # bytes


class DiskFullError(OSError):
    """There was no room for a file. The message says for which, where, how much is free, and what to do."""


def why_no_room(error: BaseException, folder: Path) -> str | None:
    """In the system's words why `error` came from a full disk; None when it did not.

    Torch and safetensors say "file write failed" and forget the reason, and errors of other processes are text. So one
    more small write into `folder` tells: ask before what has been written there is removed.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _NO_ROOM:
            return os.strerror(seen.errno)
        seen = seen.__cause__ or seen.__context__
    probe = folder / ".room"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as refused:
        return os.strerror(refused.errno) if refused.errno in _NO_ROOM else None
    finally:
        probe.unlink(missing_ok=True)
    return None


def disk_full(what: str, folder: Path, reason: str, way_on: str) -> DiskFullError:
    """The error for `what`, which `folder` had no room for. way_on: a sentence."""
    free = in_bytes(shutil.disk_usage(folder).free)
    return DiskFullError(f"no room for {what} in {folder} ({reason}; {free} are free there). {way_on}")


@contextmanager
def room_for(what: str, folder: Path, way_on: str) -> Iterator[None]:
    """Turns the error of a full disk in the block into DiskFullError; `folder` must be there by then."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise disk_full(what, folder, os.strerror(error.errno), way_on) from error


def in_bytes(size: int) -> str:
    """12.3 GiB, 640 KiB."""
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if size >= 1 << bits:
            return f"{size / (1 << bits):.1f} {unit}"
    return f"{size / 1024:.0f} KiB"


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
