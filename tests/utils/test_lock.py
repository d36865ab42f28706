"""Two runs in one folder: the second one fails, and a killed one does not block the folder."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from verl.utils.disk import NAME, InUseError, lock_folder


def test_the_second_run_fails_with_the_owner_and_the_next_one_starts(tmp_path):
    folder = tmp_path / "new" / "run"
    with lock_folder(folder):
        owner = rf"another run is using {folder} \(process {os.getpid()} on .*, since 2"
        with pytest.raises(InUseError, match=owner), lock_folder(folder):
            pass
        with lock_folder(tmp_path / "other"):
            pass
    assert list(folder.iterdir()) == []
    with lock_folder(folder):
        assert (folder / NAME).is_file()


def hold(folder: Path, ready) -> None:
    with lock_folder(folder):
        ready.set()
        signal.pause()


def test_a_killed_run_leaves_the_folder_free(tmp_path):
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    process = fork.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(20)
    with pytest.raises(InUseError, match=f"process {process.pid} on"), lock_folder(tmp_path):
        pass
    process.kill()
    process.join()
    assert (tmp_path / NAME).is_file()
    with lock_folder(tmp_path):
        assert (tmp_path / NAME).read_text().startswith(f"process {os.getpid()} on")


def count(folder: Path, file: Path) -> None:
    """Increment a number many times, each time with the folder locked."""
    done = 0
    while done < 50:
        try:
            with lock_folder(folder):
                file.write_text(str(int(file.read_text()) + 1))
                done += 1
        except InUseError:
            pass


def test_the_lock_is_exclusive(tmp_path):
    file = tmp_path / "number"
    file.write_text("0")
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=count, args=(tmp_path / "run", file)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert file.read_text() == "200"


def test_a_lock_that_cannot_be_removed_hides_no_error(tmp_path, caplog):
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path):
        (tmp_path / NAME).unlink()
        (tmp_path / NAME).mkdir()  # which `unlink` refuses
        raise ZeroDivisionError
    assert f"{tmp_path / NAME} cannot be removed" in caplog.text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *((kind, "expected a lock file that can be written, found a link") for kind in ("link", "dangling link")),
        ("pipe", "is not a regular file"),
        ("folder", r"\.in_use is a folder: .*remove the folder"),
    ],
)
def test_only_a_regular_file_is_a_lock(tmp_path, kind, expected):
    folder, target = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / ".in_use")
    elif kind == "folder":
        (folder / ".in_use").mkdir()
    else:
        (folder / ".in_use").symlink_to(target)
    if kind == "link":
        target.write_text("mine")
    with pytest.raises(ValueError, match=expected), lock_folder(folder):
        pass
    assert (
        os.path.lexists(folder / ".in_use")
        and target.exists() == (kind == "link")
        and (kind != "link" or target.read_text() == "mine")
    )
