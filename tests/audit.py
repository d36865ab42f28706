"""An audit hook that notes what code does outside of a folder: files, processes, connections, pickles."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHANGES = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.symlink": 2, "os.link": 2}
_CHANGES |= {"os.truncate": 1}
_CHANGES |= {"os.chmod": 1, "os.chown": 1, "shutil.rmtree": 1, "shutil.move": 2}
_RUNS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"}
_RUNS |= {"pickle.find_class", "socket.connect", "socket.bind", "webbrowser.open", "ctypes.dlopen"}


class Guard:
    """An audit hook of Python: notes what a case does outside of its folder. It cannot be removed, only turned off."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.found: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple) -> None:
        if self.folder is None:
            return
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and not isinstance(path, int):
                self._check(event, path)
        elif event in _RUNS:
            self.found.append(f"{event}{arguments!r:.200}")
        elif event in _CHANGES:
            # the target of a symbolic link is only a text
            for path in arguments[event == "os.symlink" : _CHANGES[event]]:
                self._check(event, path, arguments[-1])

    def _check(self, event: str, path: Any, folder: Any = -1) -> None:
        """folder: the descriptor of the folder that a path is relative to; -1: the current one."""
        if isinstance(path, int):
            return
        base = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else os.getcwd()
        full = os.path.abspath(os.path.join(base, os.fsdecode(path)))
        # the cache of compiled modules, which a first import writes
        if not full.startswith(self.folder) and full != os.devnull and "__pycache__" not in full:
            self.found.append(f"{event} {full}")

    @contextlib.contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        self.folder, self.found = str(folder), []
        try:
            yield
        finally:
            self.folder = None
        assert not self.found, f"outside of the folder of the case: {self.found}"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While an input is made: `hypothesis` writes its caches."""
        folder, self.folder = self.folder, None
        try:
            yield
        finally:
            self.folder = folder
