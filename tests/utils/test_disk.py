"""Errors of a disk: which ones concern a folder, and a folder that refuses everything."""

import errno
import os

import pytest

from verl.utils.disk import disk_full_reason, refusal


def test_a_folder_that_refuses_the_probe_hides_no_error(tmp_path):
    """The file has the permission of no one, root included."""
    (tmp_path / "file").touch()
    assert disk_full_reason(RuntimeError("file write failed"), tmp_path / "file") is None
    full = OSError(errno.ENOSPC, "No space left on device")
    assert disk_full_reason(full, tmp_path / "file") == "No space left on device"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EIO, errno.EROFS])
def test_only_errors_of_the_folder_count(number, tmp_path):
    root, other = tmp_path / "checkpoints" / "run", tmp_path / "base" / "tokenizer.json"
    (root / "global_step_1").mkdir(parents=True)
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "checkpoints" / "runs").mkdir()
    inside, text = root / "global_step_1" / "model.bin", os.strerror(number)
    counted = [[], [inside], [str(inside)], [os.fsencode(inside)], [tmp_path / "link" / "a"], [root], [root.parent]]
    for names in [*counted, [other, None, inside]]:
        assert refusal(OSError(number, text, *names), root) is not None, names
    for name in (other, str(other), tmp_path / "checkpoints" / "runs" / "a"):
        assert refusal(OSError(number, text, name), root) is None, name
    caused = RuntimeError("file write failed")
    caused.__cause__ = OSError(number, text, inside)
    assert refusal(caused, root) is caused.__cause__
    assert refusal(caused, tmp_path / "elsewhere") is None
