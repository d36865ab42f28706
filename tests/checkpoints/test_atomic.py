"""Folders of files that a setting names."""

import pytest

from verl.checkpoints.atomic import make_parent_folder


def test_the_folder_of_a_file_is_made_once(tmp_path):
    for _ in range(2):
        make_parent_folder(tmp_path / "a" / "b" / "out.json", "data.path")
        assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.path"):
        make_parent_folder(tmp_path / "file" / "out.json", "data.path")
