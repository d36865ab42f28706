"""Fault injection: how faults are read, and that each is injected once for a folder."""

import json

import pytest

from verl.utils import chaos


class Actor:
    """A worker group that records what is armed in its workers."""

    def __init__(self):
        self.armed = []

    def arm_fault(self, name):
        self.armed.append(name)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    for name in chaos.FAULTS:
        chaos.take(name)


def test_faults_are_a_list_or_a_text():
    assert chaos.read_faults(["kill@7", "nan-grad@4, kill-reward@2"]) == ["kill@7", "nan-grad@4", "kill-reward@2"]
    assert chaos.read_faults([]) == []


@pytest.mark.parametrize("wrong", ["kil@7", "kill", "kill@0", "kill@x", "kill@-1", "@3"])
def test_unknown_faults_are_refused_with_the_list(wrong):
    with pytest.raises(ValueError, match=rf"NAME@STEP with one of kill-reward, .*stale-weights, found '{wrong}'"):
        chaos.read_faults([wrong])


def test_a_fault_is_injected_once_in_its_step(tmp_path, caplog):
    actor = Actor()
    faults = chaos.Chaos(["nan-grad@2,stop-rank@2", "hang-reward@3"], tmp_path)
    for step in (1, 2, 3):
        faults.inject(step, actor, lambda: None)
    assert actor.armed == ["nan-grad", "stop-rank"] and chaos.take("hang-reward")
    recorded = [json.loads(line)["fault"] for line in (tmp_path / chaos.RECORD).read_text().splitlines()]
    assert recorded == ["nan-grad@2", "stop-rank@2", "hang-reward@3"]
    resumed = chaos.Chaos(["nan-grad@2", "stop-rank@2", "hang-reward@3", "nan-grad@4"], tmp_path)
    for step in (2, 3, 4):
        resumed.inject(step, actor, lambda: None)
    assert actor.armed == ["nan-grad", "stop-rank", "nan-grad"] and not chaos.take("hang-reward")
    resumed.start()
    assert "have been injected before" in caplog.text and "FAULTS" not in caplog.text


def test_what_an_earlier_run_has_armed_is_not_injected_into_the_next(tmp_path, caplog):
    chaos.arm("nan-grad")
    chaos.Chaos([], tmp_path).start()
    assert not chaos.take("nan-grad") and not caplog.text
    chaos.Chaos(["kill@3"], tmp_path).start()
    assert "FAULTS ARE INJECTED INTO THIS RUN (trainer.chaos): kill@3" in caplog.text


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "chaos.jsonl").write_text("[]\n")
    with pytest.raises(ValueError, match=r"chaos.jsonl: expected lines such as .* delete the file"):
        chaos.Chaos(["kill@2"], tmp_path).start()


def test_one_byte_of_the_largest_file_changes(tmp_path):
    for name, size in (("small", 10), ("large", 101)):
        (tmp_path / name).write_bytes(bytes(size))
    chaos.corrupt(tmp_path)
    assert (tmp_path / "small").read_bytes() == bytes(10)
    assert (tmp_path / "large").read_bytes() == bytes(50) + b"\x01" + bytes(50)


def test_a_checkpoint_that_does_not_exist_is_said(tmp_path, caplog):
    faults = chaos.Chaos(["corrupt-ckpt@1"], tmp_path)
    faults.inject(1, Actor(), lambda: None)
    assert "corrupt-ckpt@1 is not injected: there is no checkpoint yet" in caplog.text
    assert not (tmp_path / chaos.RECORD).exists()


def test_an_armed_fault_is_taken_once():
    assert not chaos.take("nan-weight")
    chaos.arm("nan-weight")
    assert chaos.is_armed("nan-weight") and chaos.take("nan-weight") and not chaos.take("nan-weight")


@pytest.mark.parametrize("content", [b"\xff\n", b"[1]\n", b"{}\n", b"[" * 100_000, None])
def test_a_damaged_record_is_refused(tmp_path, content):
    record = tmp_path / chaos.RECORD
    record.mkdir() if content is None else record.write_bytes(content)
    with pytest.raises(ValueError, match=r"chaos\.jsonl: expected lines such as .*: delete the file"):
        chaos.Chaos(["kill@3"], tmp_path).start()
