"""Checkpoints are whole or absent: killed at every file-system call, damaged, pruned, replaced, on a full disk."""

import hashlib
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.checkpoints.store import CheckpointError, CheckpointStore, verify
from verl.utils.disk import DiskError, DiskFullError

PARTS = ("actor", "critic")
TRACKER = "latest_checkpointed_iteration.txt"


def save(store, step, parts=PARTS, text=None):
    with store.writing(step) as folder:
        for part in parts:
            (folder / part).mkdir()
            (folder / part / "model.bin").write_text(text or f"{part} of step {step}" * 50)
        (folder / "trainer.json").write_text(f'{{"step": {step}}}')
    return folder


@contextmanager
def without_root(folder, monkeypatch):
    """As a user without the rights of root, in the folder: those above it need not be readable."""
    folder.chmod(0o777)
    monkeypatch.chdir(folder)
    user = os.geteuid()
    try:
        os.seteuid(user or 65534)
        yield
    finally:
        os.seteuid(user)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_only_checkpoints_after_a_serial_number(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    serial = store.last_serial()
    assert store.latest(after=serial - 1) == tmp_path / "global_step_1" and store.latest(after=serial) is None
    save(store, 2)
    assert store.latest(after=serial) == tmp_path / "global_step_2"
    assert store.latest(after=store.last_serial()) is None


def test_layout_and_manifest(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    assert store.latest() is None
    save(store, 20)
    folder = tmp_path / "run" / "global_step_20"
    assert names(tmp_path / "run") == ["global_step_20", TRACKER]
    assert names(folder) == ["actor", "critic", "manifest.json", "trainer.json"]
    assert (tmp_path / "run" / TRACKER).read_text() == "20"
    entry = json.loads((folder / "manifest.json").read_text())["files"]["actor/model.bin"]
    digest = hashlib.sha256(b"actor of step 20" * 50).hexdigest()
    assert entry == {"bytes": 16 * 50, "sha256": digest}
    assert store.latest() == folder == verify(folder)


def test_failure_inside_the_block_leaves_no_trace(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(RuntimeError, match="out of memory") as caught, store.writing(2) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError("out of memory")
    assert "The checkpoint of step 2 was not written" in caught.value.__notes__[0]
    assert names(tmp_path) == ["global_step_1", TRACKER] and (tmp_path / TRACKER).read_text() == "1"
    with pytest.raises(CheckpointError, match="nothing was written"), store.writing(2):
        pass
    assert store.latest() == tmp_path / "global_step_1"


def test_a_thread_that_still_writes_leaves_nothing_of_a_discarded_checkpoint(tmp_path):
    """A second Ctrl-C during a save, while the sealing thread writes."""

    def write(folder: Path) -> None:
        with suppress(FileNotFoundError):
            for number in itertools.count():
                (folder / "actor" / str(number % 50)).write_text("x")
                (folder / "manifest.json").write_text("{}")

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt), CheckpointStore(tmp_path).writing(2) as folder:
            (folder / "actor").mkdir()
            thread = threading.Thread(target=write, args=(folder,), daemon=True)
            thread.start()
            time.sleep(0.01)
            raise KeyboardInterrupt
        thread.join(5.0)
        assert (thread.is_alive(), names(tmp_path)) == (False, [])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_full_disk_keeps_what_was_there(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    with pytest.raises(DiskFullError, match="needs more than 5 KiB"), store.writing(2) as folder:
        (folder / "optimizer.bin").write_bytes(bytes(5 << 10))  # larger than the earlier checkpoint already
        (folder / "model.bin").symlink_to("/dev/full")
        (folder / "model.bin").write_text("x")
    with pytest.raises(DiskFullError, match="step 2, which needs 2 KiB") as caught, store.writing(2) as folder:
        (folder / "model.bin").symlink_to("/dev/full")
        try:
            (folder / "model.bin").write_text("x")
        except OSError as error:
            raise RuntimeError("file write failed") from error  # as torch says it
    assert "No space left on device" in str(caught.value) and "global_step_1" in str(caught.value)
    assert names(tmp_path) == ["global_step_1", TRACKER] and store.latest() == tmp_path / "global_step_1"


@pytest.mark.skipif(not os.path.isdir("/sys"), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    expected = r"the checkpoint of step 1 cannot be written to /sys/run: .*'/sys/run'\. There is no earlier checkpoint"
    with pytest.raises(DiskError, match=expected), CheckpointStore("/sys/run").writing(1):
        pass
    store = CheckpointStore(tmp_path)
    save(store, 1)
    expected = rf"cannot be written to {tmp_path}: .* global_step_1 and earlier .* then resumes from {tmp_path}/global"
    with pytest.raises(DiskError, match=expected), store.writing(2) as folder:
        (folder / "actor").symlink_to("/sys")
        try:
            os.mkdir(folder / "actor/run")
        except OSError as error:
            raise RuntimeError("file write failed") from error  # as torch says it
    assert names(tmp_path) == ["global_step_1", TRACKER]


@pytest.mark.skipif(not os.path.isdir("/sys"), reason="needs a folder that nobody can write to")
def test_a_refusal_elsewhere_is_not_blamed_on_the_checkpoints(tmp_path):
    with pytest.raises(OSError, match=r"'/sys/tokenizer\.json'") as caught, CheckpointStore(tmp_path).writing(1):
        os.mkdir("/sys/tokenizer.json")
    assert not isinstance(caught.value, DiskError)
    assert caught.value.__notes__ == [
        f"The checkpoint of step 1 was not written to {tmp_path}. There is no earlier checkpoint."
    ]


def test_full_disk_is_found_out_where_the_error_says_nothing_of_it(tmp_path):
    store = CheckpointStore(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        message = r"needs more than 1 KiB, .* \(File too large; .* There is no earlier checkpoint"
        with pytest.raises(DiskFullError, match=message), store.writing(1) as folder:
            (folder / "model.bin").write_text("x" * 1024)
            raise RuntimeError("a process on another machine could not write")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert names(tmp_path) == []


def test_a_save_that_will_not_fit_is_announced_once(tmp_path, monkeypatch, caplog):
    def set_free(size: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size))

    store = CheckpointStore(tmp_path / "run")
    set_free(0)
    store.warn_of_space()  # its size is not known yet
    CheckpointStore(tmp_path / "run").warn_of_space(2 << 20)  # nor its disk
    (tmp_path / "first").mkdir()
    CheckpointStore(tmp_path / "first").warn_of_space(2 << 20)
    assert "needs about 2.0 MiB" in caplog.messages[0]
    caplog.clear()
    with store.writing(1) as folder:
        (folder / "model.bin").write_bytes(bytes(5 << 20))
    for known in (store, CheckpointStore(tmp_path / "run")):  # a resumed run knows it from the start
        for size, count in ((6 << 20, 0), (4 << 20, 1), (4 << 20, 1), (6 << 20, 1), (4 << 20, 2)):
            set_free(size)
            known.warn_of_space()
            assert len(caplog.messages) == count
        assert f"needs about 5.0 MiB, and {tmp_path / 'run'} has 4.0 MiB free" in caplog.messages[0]
        caplog.clear()


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose reading fails")
def test_a_file_that_cannot_be_read_is_damage(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    with store.writing(20) as folder:
        (folder / "empty").touch()
    (tmp_path / "global_step_20/empty").unlink()
    (tmp_path / "global_step_20/empty").symlink_to("/proc/self/mem")  # its address 0: Input/output error
    with caplog.at_level(logging.ERROR):
        assert store.latest() == tmp_path / "global_step_10"
    assert "global_step_20 is damaged: empty cannot be read (Input/output error)" in caplog.text


@pytest.mark.parametrize("mode", [0, 0o400])
def test_a_folder_that_this_user_cannot_read_is_damage(tmp_path, monkeypatch, caplog, mode):
    with without_root(tmp_path, monkeypatch):
        store = CheckpointStore(".")
        save(store, 1)
        save(store, 2)
        Path("global_step_2").chmod(mode)
        assert store.latest() == Path("global_step_1")
        save(store, 3)
        assert store.latest() == Path("global_step_3")
        Path("global_step_2").chmod(0o700)
    assert "global_step_2 is damaged: manifest.json cannot be read ([Errno 13] Permission denied" in caplog.text


def test_nothing_usable_is_an_error_not_a_new_start(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    flip_byte(tmp_path / "global_step_10/actor/model.bin")
    with pytest.raises(CheckpointError, match=r"no usable checkpoint .*global_step_10 is damaged.*resume_mode=disable"):
        store.latest()


def test_a_path_named_by_the_user_is_used_or_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    save(store, 20)
    assert store.path(20) == store.latest()
    assert store.resume_path(str(tmp_path / "global_step_10")) == tmp_path / "global_step_10"
    with pytest.raises(CheckpointError, match="global_step_99 does not exist"):
        store.resume_path(tmp_path / "global_step_99")
    with pytest.raises(CheckpointError, match="expected a folder called global_step_N"):
        store.resume_path(tmp_path)


def test_keep_holds_over_a_resume(tmp_path):
    for _ in range(3):  # a new process each time: nothing is remembered but what is on the disk
        store = CheckpointStore(tmp_path, keep=2)
        latest = store.latest()
        begin = int(latest.name.split("_")[-1]) if latest else 0
        for step in (begin + 1, begin + 2):
            save(store, step)
    assert names(tmp_path) == ["global_step_5", "global_step_6", TRACKER]
    with pytest.raises(ValueError, match=r"keep: expected at least 1.* found 0"):
        CheckpointStore(tmp_path, keep=0)


def test_a_checkpoint_that_cannot_be_deleted_stays_and_training_goes_on(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    folder = tmp_path / "global_step_1"
    folder.chmod(0o500)
    if os.geteuid() == 0 and subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
        pytest.skip("root can delete any file here")
    try:
        for step in (2, 3):
            save(store, step)
            assert store.latest() == tmp_path / f"global_step_{step}"
    finally:
        if os.geteuid() == 0:
            subprocess.run(["chattr", "-i", folder], check=True)
        for kept in tmp_path.glob("*global_step_1"):
            kept.chmod(0o700)
    assert "global_step_1 cannot be deleted: " in caplog.text
    assert not (tmp_path / "global_step_2").exists()
    save(store, 4)
    assert names(tmp_path) == ["global_step_4", TRACKER]


def test_a_replaced_checkpoint_that_cannot_be_deleted_does_not_end_the_save(tmp_path, monkeypatch, caplog):
    with without_root(tmp_path, monkeypatch):
        store = CheckpointStore(".")
        save(store, 1)
        Path("global_step_1/actor").chmod(0o500)
        save(store, 1, text="second")
        assert (store.latest() / "actor/model.bin").read_text() == "second"
        assert ".replaced_global_step_1 cannot be deleted: " in caplog.text
        Path(".garbage_.replaced_global_step_1").rename(".replaced_global_step_1")  # killed before the deletion
        Path(".replaced_global_step_1/manifest.json").write_text("{}")
        caplog.clear()
        assert (store.latest() / "actor/model.bin").read_text() == "second"
        assert ".replaced_global_step_1 cannot be deleted: " in caplog.text
        Path(".garbage_.replaced_global_step_1/actor").chmod(0o700)
        save(store, 2)
        assert names(Path(".")) == ["global_step_1", "global_step_2", TRACKER]


def test_a_run_started_again_from_an_earlier_step_keeps_its_own(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (90, 100):
        save(store, step)
    save(store, 10)  # a new start in the same folder: the newest is step 10, whatever the number says
    assert names(tmp_path) == ["global_step_10", "global_step_100", TRACKER]
    assert store.latest() == tmp_path / "global_step_10"


def test_pruning_spares_the_newest_intact_one(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        save(store, step)
    (tmp_path / "global_step_4/actor/model.bin").unlink()
    store.prune(1)
    assert names(tmp_path) == ["global_step_3", "global_step_4", TRACKER]
    foreign = tmp_path / "global_step_0"
    foreign.mkdir()
    store.prune(1)
    assert foreign.is_dir()  # what we did not write is not ours to delete


def test_a_checkpoint_of_the_same_step_is_replaced_and_a_foreign_one_set_aside(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 5, text="first")
    save(store, 5, text="second")
    assert (tmp_path / "global_step_5/actor/model.bin").read_text() == "second"
    assert names(tmp_path) == ["global_step_5", TRACKER]
    (tmp_path / "global_step_6").mkdir()
    (tmp_path / "global_step_6/mine").write_text("precious")
    save(store, 6)
    (aside,) = tmp_path.glob("global_step_6.set_aside_*")
    assert (aside / "mine").read_text() == "precious" and "set_aside" in caplog.text
    assert store.latest() == tmp_path / "global_step_6"


# A process that counts the file-system calls of saving and kills itself (SIGKILL: no clean-up runs) at number `fatal`.
KILLED = """
import os, signal, sys
from pathlib import Path
from verl.checkpoints.store import CheckpointStore

root, fatal, events = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
calls = 0

def count(event, args):
    global calls
    if event in events and str(root) in str(args):
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

store = CheckpointStore(root, keep=2)
sys.addaudithook(count)
for step in (3, 4, 3):  # new, new with pruning, and one that replaces
    with store.writing(step) as folder:
        for part in ("actor", "critic"):
            (folder / part).mkdir()
            (folder / part / "model.bin").write_text(f"{part} of step {step}" * 50)
"""


def prepared(root):
    for step in (1, 2):
        save(CheckpointStore(root, keep=2), step)


def assert_sound(root, caplog):
    """No checkpoint looks damaged, the newest holds its own step, and a save afterwards leaves no rest of the kill."""
    caplog.clear()
    store = CheckpointStore(root, keep=2)
    latest = store.latest()
    step = int(latest.name.split("_")[-1])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert all((latest / part / "model.bin").read_text() == f"{part} of step {step}" * 50 for part in PARTS)
    for folder in root.glob("global_step_*"):
        verify(folder)
    save(store, 50)
    assert not [name for name in names(root) if name.startswith(".") and "draft" not in name]
    assert len(list(root.glob("global_step_*"))) == 2
    return step


@pytest.fixture
def in_memory(tmp_path):
    """A folder in memory where there is one: thousands of fsyncs on a disk take half a minute."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("text", ["", "5", '{"metric": "x"}', '{"step": "2"}', "{"])
def test_a_damaged_file_of_the_best_checkpoint_is_ignored(tmp_path, text, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.mark_best({"step": 1})
    (tmp_path / "best_checkpoint.json").write_text(text)
    assert store.best() is None and "is ignored" in caplog.text
    store.mark_best({"step": 1})
    assert store.best() == {"step": 1}


#: of which the first is a test of seconds
EVENTS = ["os.rename os.remove", "open os.rename os.mkdir os.remove os.rmdir shutil.rmtree"]


@pytest.mark.parametrize("events", [EVENTS[0], pytest.param(EVENTS[1], marks=pytest.mark.slow)])
def test_killed_at_every_file_system_call(in_memory, caplog, events):
    """One forked process per call: a fresh interpreter each time would take the test's time for nothing."""
    fatal, seen = 0, set()
    prepared(in_memory / "first")
    while True:
        fatal += 1
        root = shutil.copytree(in_memory / "first", in_memory / str(fatal))
        pid = os.fork()
        if pid == 0:
            sys.argv = ["killed", str(root), str(fatal), *events.split()]
            exec(compile(KILLED, "killed", "exec"), {"__name__": "killed"})
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        seen.add(assert_sound(root, caplog))
    assert fatal > (12 if events == EVENTS[0] else 60) and seen == {2, 3, 4}


@pytest.mark.slow  # at times that nobody chose; the fast ones are those of the test before
def test_killed_at_random_times_while_saving(tmp_path, caplog):
    program = KILLED.replace("for step in (3, 4, 3):", "import itertools\nfor step in itertools.count(3):")
    rng = random.Random(0)
    prepared(tmp_path)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), "-1"])
        time.sleep(0.2 + 0.3 * rng.random())
        process.kill()
        process.wait()
        assert CheckpointStore(tmp_path).latest() is not None
    assert_sound(tmp_path, caplog)


def test_a_checkpoint_that_was_saved_as_the_best_ends_with_the_next_best(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        save(store, step)

    def steps() -> list[int]:
        return [step for step in range(1, 5) if store.path(step).exists()]

    store.mark_best({"step": 1, "saved_as_best": True})
    store.mark_best({"step": 1, "saved_as_best": True})
    assert steps() == [1, 2, 3, 4]
    store.mark_best({"step": 2, "saved_as_best": False})  # this one was due
    assert steps() == [2, 3, 4]
    store.mark_best({"step": 4, "saved_as_best": True})
    store.mark_best({"step": 3, "saved_as_best": True})
    assert steps() == [2, 3, 4], "the newest one is kept: a run resumes from it"
    assert os.readlink(tmp_path / "best") == "global_step_3"


@pytest.mark.parametrize("name", ["global_step_3", ".writing_global_step_3", ".garbage_global_step_1", "best"])
@pytest.mark.parametrize("target", ["/no/such/folder", "itself", "outside", "global_step_1"])
def test_links_in_the_folder_of_a_run(tmp_path, name, target):
    """They neither stop a save nor is what they lead to changed."""
    store, outside = CheckpointStore(tmp_path / "run", keep=2), tmp_path / "outside"
    save(store, 1), save(store, 2)
    outside.mkdir()
    (outside / "mine").write_text("x")
    link = tmp_path / "run" / name
    link.symlink_to({"itself": name, "outside": outside}.get(target, target))
    save(store, 3)
    store.mark_best({"step": 3})
    assert store.latest() == verify(tmp_path / "run" / "global_step_3") and not store.path(3).is_symlink()
    assert (outside / "mine").read_text() == "x"
    assert (tmp_path / "run" / "best").resolve() == store.path(3)


def test_a_checkpoint_that_was_moved_behind_a_link_is_used_and_unlinked(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    save(store, 1), save(store, 2)
    moved = tmp_path / "elsewhere"
    store.path(1).rename(moved)
    store.path(1).symlink_to(moved)
    assert verify(store.path(1)) == store.path(1)
    store.prune(1)
    assert not os.path.lexists(store.path(1)) and list(moved.rglob("model.bin"))
    assert store.latest() == store.path(2)
