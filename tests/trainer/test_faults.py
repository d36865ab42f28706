"""Fault injection: how faults are read, and that each is injected once for a folder."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.runs import lines
from verl.rewards.sandbox.pool import Call, ProcessPool
from verl.trainer.guards import faults
from verl.workers import policy


class Actor:
    """A worker group that records what is armed in its workers."""

    def __init__(self):
        self.armed = []

    def arm_fault(self, name):
        self.armed.append(name)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faults.disarm()


def guard_of(*texts: str) -> faults.Faults:
    return faults.Faults(SimpleNamespace(trainer=SimpleNamespace(chaos=texts)))


def view_of(folder: Path, actor: Actor | None = None) -> SimpleNamespace:
    """A run without a checkpoint."""
    store = SimpleNamespace(newest=lambda: None)
    return SimpleNamespace(folder=folder, roles={"actor": actor}, checkpointer=SimpleNamespace(store=store))


def inject(guard: faults.Faults, view: SimpleNamespace, *steps: int) -> None:
    for step in steps:
        view.step = step - 1
        guard.before_step(view)


def is_armed(name: str) -> bool:
    return name in faults._armed


def test_faults_are_a_list_or_a_text():
    assert faults.read_faults(["kill@7", "nan-grad@4, kill-reward@2"]) == ["kill@7", "nan-grad@4", "kill-reward@2"]
    assert faults.read_faults([]) == []


@pytest.mark.parametrize("wrong", ["kil@7", "kill", "kill@0", "kill@x", "kill@-1", "@3"])
def test_unknown_faults_are_refused_with_the_list(wrong):
    with pytest.raises(ValueError, match=rf"NAME@STEP with one of kill-reward, .*stale-weights, found '{wrong}'"):
        faults.read_faults([wrong])


def test_a_fault_is_injected_once_in_its_step(tmp_path, caplog):
    view = view_of(tmp_path, Actor())
    inject(guard_of("nan-grad@2,stop-rank@2", "hang-reward@3"), view, 1, 2, 3)
    assert view.roles["actor"].armed == ["nan-grad", "stop-rank"] and is_armed("hang-reward")
    faults.disarm()
    assert [line["fault"] for line in lines(tmp_path / faults.RECORD)] == ["nan-grad@2", "stop-rank@2", "hang-reward@3"]
    resumed = guard_of("nan-grad@2", "stop-rank@2", "hang-reward@3", "nan-grad@4")
    inject(resumed, view, 2, 3, 4)
    assert view.roles["actor"].armed == ["nan-grad", "stop-rank", "nan-grad"] and not is_armed("hang-reward")
    resumed.at_start(view)
    assert "have been injected before" in caplog.text and "FAULTS" not in caplog.text


def test_the_end_of_a_run_disarms_its_faults(tmp_path, caplog):
    original = policy.policy_objective
    faults.arm("nan-grad")
    assert policy.policy_objective is not original
    guard_of("kill@3").at_end(view_of(tmp_path))
    assert policy.policy_objective is original
    guard_of("kill@3").at_start(view_of(tmp_path))
    assert "FAULTS ARE INJECTED INTO THIS RUN (trainer.chaos): kill@3" in caplog.text


def test_one_byte_of_the_largest_file_changes(tmp_path):
    for name, size in (("small", 10), ("large", 101)):
        (tmp_path / name).write_bytes(bytes(size))
    faults.corrupt(tmp_path)
    assert (tmp_path / "small").read_bytes() == bytes(10)
    assert (tmp_path / "large").read_bytes() == bytes(50) + b"\x01" + bytes(50)


def test_a_checkpoint_that_does_not_exist_is_said(tmp_path, caplog):
    inject(guard_of("corrupt-ckpt@1"), view_of(tmp_path), 1)
    assert "corrupt-ckpt@1 is not injected: there is no checkpoint yet" in caplog.text
    assert not (tmp_path / faults.RECORD).exists()


def test_an_armed_fault_is_injected_into_one_call():
    original = ProcessPool.map
    calls, pool = [*[Call(("m", "f", "score"), {})] * 2], SimpleNamespace()
    try:
        ProcessPool.map = lambda pool, calls, limits: [call.address[0] for call in calls]
        faults.arm("kill-reward")
        assert ProcessPool.map(pool, [], None) == []
        assert [ProcessPool.map(pool, calls, None) for _ in range(2)] == [["subprocess", "m"], ["m", "m"]]
    finally:
        ProcessPool.map = original


@pytest.mark.parametrize("content", [b"\xff\n", b"[]\n", b"[1]\n", b"{}\n", b"[" * 100_000, None])
def test_a_damaged_record_is_refused(tmp_path, content):
    record = tmp_path / faults.RECORD
    record.mkdir() if content is None else record.write_bytes(content)
    with pytest.raises(ValueError, match=r"chaos\.jsonl: expected lines such as .*: delete the file"):
        guard_of("kill@3").at_start(view_of(tmp_path))
