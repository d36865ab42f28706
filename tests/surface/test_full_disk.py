"""A disk that is full while a run saves: one message, nothing lost, and the same command goes on when there is room.

`ulimit -f` stands for the full disk: any file that grows beyond it is refused by the system, as on a disk without room.
"""

import resource
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file

from verl.checkpoints.store import verify
from verl.tracking.run_record import RunRecord
from verl.trainer.main_ppo import main

ASYNC = "actor_rollout_ref.actor.checkpoint.async_save=true"


@contextmanager
def files_up_to(size: int):
    """In this process no file becomes larger than `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.fast("in the background")
@pytest.mark.parametrize("how", [[], [ASYNC]], ids=["at once", "in the background"])
def test_a_run_resumes_when_there_is_space_again(how, settings, tmp_path, capsys):
    run = tmp_path / "run"
    command = [*settings, *how, "trainer.save_freq=1", "trainer.total_training_steps=2"]
    assert main([*command, "trainer.total_training_steps=1"]) == 0
    capsys.readouterr()
    with files_up_to(100_000):  # the weights are 413 kB
        assert main(command) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(
        f"error: no space left for the checkpoint of step 2, which needs 1.7 MiB, in {run} (File too large"
    )
    assert "global_step_1 and earlier checkpoints are unchanged" in shown and "Traceback" not in shown
    assert shown.rstrip().endswith(f"The same command then resumes from {run / 'global_step_1'}")
    assert sorted(path.name for path in run.glob("*global_step*")) == ["global_step_1"]
    verify(run / "global_step_1")
    assert main(command) == 0
    assert main([*command, f"trainer.default_local_dir={tmp_path / 'whole'}"]) == 0
    weights = "global_step_2/actor/huggingface/model.safetensors"
    whole = load_file(tmp_path / "whole" / weights)
    assert all((tensor == whole[name]).all() for name, tensor in load_file(run / weights).items())


def test_responses_that_find_no_space_do_not_end_the_run(settings, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(RunRecord, "_write", lambda record: None)  # run.json is larger
    folders = [f"trainer.{name}_data_dir={tmp_path / name}" for name in ("rollout", "validation")]
    command = [*settings, *folders, "trainer.test_freq=1", "trainer.total_training_steps=3", "trainer.logger=[console]"]
    with files_up_to(100):
        assert main(command) == 0
    messages = [message for message in caplog.messages if "training continues" in message]
    assert f"no space left for 1.jsonl in {tmp_path / 'rollout'} (File too large" in messages[0]
    assert [message[-14:] for message in messages] == ["(1 such files)", "(2 such files)", "(4 such files)"]
    assert list((tmp_path / "rollout").iterdir()) == list((tmp_path / "validation").iterdir()) == []
