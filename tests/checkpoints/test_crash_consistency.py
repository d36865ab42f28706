"""A machine that loses power: every prefix of the file operations of a save, with unsynced writes lost or torn.

`Disk` follows what is durable: the contents of a file after fsync of the file, the entries of a folder after fsync of
the folder. From each moment of a save it builds the states that a file system may show after a crash.
"""

import functools
import json
import os
import shutil
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoints.test_store import save
from verl.checkpoints.store import CheckpointStore

VARIANTS = ("lost", "entries only", "torn", "root only")
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink"}
_recorder = None  # an audit hook cannot be removed, so there is one, from the first recording on


def _hook(event, args):
    if _recorder is not None and event in EVENTS and (event != "open" or (args[2] or 0) & os.O_ACCMODE):
        _recorder.observe()


_install_hook = functools.cache(lambda: sys.addaudithook(_hook))


class Disk:
    """The current and the durable state of a folder.

    Files and folders have ids, since a file system reuses inode numbers. `tree` is what a program sees:
    path -> (id, contents; None: a folder).
    """

    def __init__(self, top: Path):
        self.top = top
        self.ids: dict[int, int] = {}
        self.contents: dict[int, bytes] = {}  # durable, of files
        self.entries: dict[int, dict[str, int]] = {}  # durable, of folders
        self.kinds: dict[int, str] = {}
        self.links: dict[int, str] = {}
        self.moments: list[tuple] = []
        self._lock, self._reader = threading.RLock(), None
        self.tree = self._read()
        self._sync_all()

    def _read(self) -> dict[str, tuple[int, bytes | None]]:
        found, inodes = {}, set()
        for path in [self.top, *sorted(self.top.rglob("*"))]:
            try:
                status = path.lstat()
                is_link = path.is_symlink()
                data = None if path.is_dir() and not is_link else b"" if is_link else path.read_bytes()
            except FileNotFoundError:
                continue
            inodes.add(status.st_ino)
            if status.st_ino not in self.ids:
                self.ids[status.st_ino] = len(self.kinds)
                self.kinds[len(self.kinds)] = "link" if is_link else "folder" if data is None else "file"
            if is_link:
                self.links[self.ids[status.st_ino]] = os.readlink(path)
            found[str(path.relative_to(self.top))] = (self.ids[status.st_ino], data)
        self.ids = {inode: number for inode, number in self.ids.items() if inode in inodes}
        return found

    def _children(self, folder: str) -> dict[str, int]:
        return {
            Path(name).name: number
            for name, (number, _) in self.tree.items()
            if name != "." and str(Path(name).parent) == folder
        }

    def _sync_all(self) -> None:
        for name, (number, data) in self.tree.items():
            if data is None:
                self.entries[number] = self._children(name)
            else:
                self.contents[number] = data

    def observe(self) -> None:
        """A file operation is about to happen: remember this moment."""
        if self._reader == threading.get_ident():  # reading is no operation
            return
        with self._lock:
            self._reader = threading.get_ident()
            self.tree = self._read()
            self.moments.append((dict(self.tree), dict(self.contents), dict(self.entries)))
            self._reader = None

    def synced(self, descriptor: int) -> None:
        """The file or folder with this descriptor has been fsynced; files are, in several threads."""
        with self._lock:
            self.observe()
            number = self.ids.get(os.fstat(descriptor).st_ino)
            for name, (each, data) in self.tree.items():
                if each == number and data is None:
                    self.entries[number] = self._children(name)
                elif each == number:
                    self.contents[number] = data

    def build(self, moment: tuple, variant: str, root: str, target: Path) -> None:
        """Write the state after a crash at `moment` to `target`.

        lost: nothing is there that was not fsynced. entries only: all folders are current, unsynced contents are empty.
        torn: the same with half of the contents. root only: the entries of the checkpoint root are those that were
        fsynced, other folders are current.
        """
        tree, contents, entries = moment
        current: dict[int, dict[str, int]] = {}
        data = {number: value for number, value in tree.values() if value is not None}
        for name, (number, value) in tree.items():
            if value is None:
                current.setdefault(number, {})
            if name != ".":
                current.setdefault(tree[str(Path(name).parent)][0], {})[Path(name).name] = number
        roots = {tree[name][0] for name in (".", root) if name in tree}

        def write(number: int, path: Path) -> None:
            if self.kinds[number] == "link":
                path.symlink_to(self.links[number])
            elif self.kinds[number] == "file":
                unsynced = data.get(number, b"")
                path.write_bytes(contents.get(number, unsynced[: len(unsynced) // 2] if variant == "torn" else b""))
            else:
                path.mkdir()
                durable = variant == "lost" or (variant == "root only" and number in roots)
                children = entries.get(number, {}) if durable else current.get(number, {})
                for name, child in children.items():
                    write(child, path / name)

        write(tree["."][0], target)


@contextmanager
def recorded(top: Path, monkeypatch):
    global _recorder
    _install_hook()
    disk, fsync = Disk(top), os.fsync

    def synced(descriptor):
        fsync(descriptor)
        disk.synced(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    _recorder = disk
    try:
        yield disk
        disk.observe()
    finally:
        _recorder = None
        monkeypatch.setattr(os, "fsync", fsync)


def newest_step(top: Path) -> int:
    """The step from which a run would resume; 0: it starts."""
    folder = CheckpointStore(top / "runs" / "run").latest()
    return 0 if folder is None else json.loads((folder / "trainer.json").read_text())["step"]


@pytest.fixture
def memory():
    """A folder in memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    yield folder
    shutil.rmtree(folder)


def replay(memory: Path, monkeypatch, actions, allowed, last) -> int:
    """Crash at every moment of `actions`; returns the number of states that were tried.

    Args:
        allowed: steps that may be the newest after a crash.
        last: the step that must be durable at the end.
    """
    top, count = memory / "disk", 0
    with recorded(top, monkeypatch) as disk:
        for action in actions:
            action()
    for i, moment in enumerate(disk.moments):
        for variant in VARIANTS:
            target = memory / "crashed"
            disk.build(moment, variant, "runs/run", target)
            found = newest_step(target)
            assert found in allowed, (i, variant)
            if i == len(disk.moments) - 1:
                assert found == last, variant
            if i % 10 == 0:
                save(CheckpointStore(target / "runs" / "run", keep=1), 9)
                assert newest_step(target) == 9, (i, variant)
            shutil.rmtree(target)
            count += 1
    return count


def test_the_first_checkpoint_survives_a_power_failure(memory, monkeypatch):
    (memory / "disk").mkdir()
    store = CheckpointStore(memory / "disk" / "runs" / "run")
    assert replay(memory, monkeypatch, [lambda: save(store, 1)], {0, 1}, last=1) > 60


def test_one_checkpoint_is_always_usable(memory, monkeypatch):
    store = CheckpointStore(memory / "disk" / "runs" / "run", keep=1)
    save(store, 1)
    assert replay(memory, monkeypatch, [lambda: save(store, 2)], {1, 2}, last=2) > 100


@pytest.mark.slow
def test_every_prefix_of_three_saves(memory, monkeypatch):
    """With two checkpoints kept, the best one marked, and a step that is replaced."""
    store = CheckpointStore(memory / "disk" / "runs" / "run", keep=2)
    save(store, 1)
    actions = [
        lambda: save(store, 2),
        lambda: store.mark_best({"step": 2, "saved_as_best": True}),
        lambda: save(store, 3),
        lambda: store.mark_best({"step": 3, "saved_as_best": False}),
        lambda: save(store, 3),
    ]
    assert replay(memory, monkeypatch, actions, {1, 2, 3}, last=3) > 400


def test_the_recorder_finds_a_save_that_does_not_sync(memory, monkeypatch):
    """The same with a rename that comes before the data: at some moment there is no usable checkpoint."""
    store = CheckpointStore(memory / "disk" / "runs" / "run", keep=1)
    save(store, 1)

    def careless():
        shutil.rmtree(store.path(1))
        save(store, 2)

    with pytest.raises((AssertionError, ValueError)):
        replay(memory, monkeypatch, [careless], {1, 2}, last=2)
