"""File operations on local paths and, with the command `hdfs`, on hdfs:// addresses."""

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from verl.utils.paths import expanded


def is_non_local(path: str) -> bool:
    """Whether a path is an hdfs:// address."""
    return str(path).startswith("hdfs://")


def exists(path: str, **kwargs) -> bool:
    """Whether a file or folder exists."""
    if is_non_local(path):
        return _hdfs("-test", "-e", path, check=False).returncode == 0
    return expanded(path).exists()


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs) -> None:
    """Create a folder and its parents. On HDFS, a folder that exists is not an error."""
    if is_non_local(name):
        _hdfs("-mkdir", "-p", name)
    else:
        expanded(name).mkdir(mode, parents=True, exist_ok=exist_ok)


def local_mkdir_safe(path: str) -> str:
    """Create a local folder and its parents unless they exist. Returns its absolute path."""
    folder = expanded(path).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def copy(src: str, dst: str, **kwargs) -> bool:
    """Copy a file or folder between local paths and HDFS. An existing target is overwritten.

    Returns:
        True; a copy that fails raises OSError.
    """
    if is_non_local(src) or is_non_local(dst):
        direction = "-cp" if is_non_local(src) and is_non_local(dst) else "-get" if is_non_local(src) else "-put"
        _hdfs(direction, "-f", str(src), str(dst))
        return True
    source, target = expanded(src), expanded(dst)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
    return True


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """Return a local path of a file or folder: an hdfs:// address is downloaded once, anything else is unchanged.

    Args:
        src: local path, name on a model hub, or hdfs:// address.
        cache_dir: folder of downloads; the default is a folder of the system's temporary folder.
        always_recopy: download again.
        filelock, verbose, use_shm: accepted for callers of public verl; they do not change the returned files.
    """
    if not is_non_local(src):
        return src
    folder = (
        Path(cache_dir or Path(tempfile.gettempdir()) / "verl_hdfs") / hashlib.sha256(src.encode()).hexdigest()[:16]
    )
    local = folder / src.rstrip("/").rpartition("/")[2]
    if always_recopy or not local.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _hdfs("-get", src, str(part / local.name))
        (part / local.name).replace(local)
    return str(local)


copy_local_path_from_hdfs = copy_to_local


def _hdfs(*command: str, check: bool = True) -> subprocess.CompletedProcess:
    binary = shutil.which("hdfs")
    if binary is None:
        raise OSError(
            f"{command[-1]}: hdfs:// addresses need the command `hdfs`, which is not on PATH: install Hadoop's client "
            "or use a local path"
        )
    done = subprocess.run(
        [binary, "dfs", *command], capture_output=True, text=True, check=False, encoding="utf-8", errors="replace"
    )
    if check and done.returncode:
        raise OSError(f"hdfs dfs {' '.join(command)} failed with exit status {done.returncode}: {done.stderr.strip()}")
    return done
