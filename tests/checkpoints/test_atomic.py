"""Folders that cannot be written to are refused by their key."""

import pytest

from verl.checkpoints.atomic import check_folder


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
