"""Two runs in one folder: the second is refused, and a killed one is in nobody's way."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from verl.utils.lock import NAME, InUseError, only_run_in


def test_the_second_is_told_who_is_there_and_the_next_is_welcome(tmp_path):
    folder = tmp_path / "new" / "run"
    with only_run_in(folder):
        owner = rf"at work in {folder} \(process {os.getpid()} on .*, since 2"
        with pytest.raises(InUseError, match=owner), only_run_in(folder):
            pass
        with only_run_in(tmp_path / "other"):
            pass
    assert list(folder.iterdir()) == []
    with only_run_in(folder):
        assert (folder / NAME).is_file()


def hold(folder: Path, ready) -> None:
    with only_run_in(folder):
        ready.set()
        signal.pause()


def test_a_killed_run_leaves_the_folder_free(tmp_path):
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    process = fork.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(20)
    with pytest.raises(InUseError, match=f"process {process.pid} on"), only_run_in(tmp_path):
        pass
    process.kill()
    process.join()
    assert (tmp_path / NAME).is_file()
    with only_run_in(tmp_path):
        assert (tmp_path / NAME).read_text().startswith(f"process {os.getpid()} on")


def count(folder: Path, file: Path) -> None:
    """Add one to a number, many times, each time with the folder for itself."""
    done = 0
    while done < 50:
        try:
            with only_run_in(folder):
                file.write_text(str(int(file.read_text()) + 1))
                done += 1
        except InUseError:
            pass


def test_no_two_are_in_it_at_any_moment(tmp_path):
    file = tmp_path / "number"
    file.write_text("0")
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=count, args=(tmp_path / "run", file)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert file.read_text() == "200"
