"""Folders that cannot be written to are refused by their key."""

import errno

import pytest

from verl.checkpoints import atomic, store
from verl.checkpoints.atomic import check_folder
from verl.utils.disk import DiskFullError


def test_links_that_lead_nowhere_are_refused(tmp_path):
    link = tmp_path / "run"
    for target, expected in (
        ("/no/such/folder", r"run', a link to '/no/such/folder', which does not exist: create that folder, or remove"),
        ("run", r"trainer\.default_local_dir: expected a writable folder, found '.*run'"),
    ):
        link.symlink_to(target)
        with pytest.raises(ValueError, match=expected):
            check_folder("trainer.default_local_dir", link)
        link.unlink()
    (tmp_path / "disk").mkdir()
    link.symlink_to(tmp_path / "disk")
    check_folder("trainer.default_local_dir", link)


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path, monkeypatch):
    """Of both writers. The store gets the error of the system: it knows what did not fit."""
    path = tmp_path / "latest"
    path.write_text("1")

    def full(_path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        store._write_atomically(path, "2")
    assert not isinstance(raised.value, DiskFullError)
    with pytest.raises(DiskFullError, match="no space left for latest"), atomic.atomic_write(path) as draft:
        draft.write_text("2")
    with pytest.raises(OSError, match="of another kind"), atomic.atomic_write(path):
        raise OSError("of another kind")
    assert path.read_text() == "1" and [file.name for file in tmp_path.iterdir()] == ["latest"]
