"""Runs that train adapters, and runs whose checkpoints are written in the background."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.runs import fit, steps_in
from tests.waiting import wait_until
from verl.engines.checkpoint import ShardWriter
from verl.trainer.base import StepReport
from verl.trainer.guards.interruption import Stopped
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.state.checkpointing import Checkpointer

KL = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"]
LORA = [*KL, "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
LORA += [f"actor_rollout_ref.model.{setting}" for setting in ("lora_rank=4", "lora_alpha=8")]
RANKS = ["trainer.n_gpus_per_node=2"]
NAMES = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "rollout/logprob_gap_max")


def run(settings: list[str], *more: str, steps: int = 3) -> list[dict[str, float]]:
    _, reports = fit([*settings, *more, f"trainer.total_training_steps={steps}"])
    return [{name: report[name] for name in NAMES} for report in reports]


# ---- adapters ---------------------------------------------------------------------------------------------------


def test_a_run_with_adapters_samples_what_it_trains_and_measures_kl_to_the_start(settings, tiny, tmp_path):
    pytest.importorskip("peft")
    save = ["trainer.save_freq=3", "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"]
    alone = run(settings, *LORA, *save)
    for step in alone:  # the answers came from the weights that the trainer has, adapters included
        assert step["rollout/logprob_gap_max"] < 1e-4
    assert alone[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert alone[-1]["actor/kl_loss"] > 1e-6
    actor = tmp_path / "run" / "global_step_3" / "actor"
    assert json.loads((actor / "lora_adapter" / "adapter_config.json").read_text())["lora_alpha"] == 8
    base, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny / "model", actor / "huggingface"))
    assert any(not torch.equal(a, b) for a, b in zip(base.parameters(), merged.parameters()))


@pytest.mark.slow
def test_a_run_with_adapters_gives_the_same_numbers_in_several_processes(settings):
    pytest.importorskip("peft")
    alone = run(settings, *LORA)
    ranks = run(settings, *LORA, *RANKS, "trainer.resume_mode=disable")
    for step, (a, b) in enumerate(zip(ranks, alone, strict=True), start=1):
        gap = "rollout/logprob_gap_max"  # noise of float32
        assert {**a, gap: 0} == pytest.approx({**b, gap: 0}, rel=1e-3, abs=1e-5), f"step {step}"


def test_a_run_with_adapters_has_no_second_model_for_the_reference(settings):
    trainer = LocalPPOTrainer(overrides=[*settings, *LORA])
    trainer.init_workers()
    assert trainer.roles["ref"] is trainer.roles["actor"]
    full = LocalPPOTrainer(overrides=[*settings, *KL])
    full.init_workers()
    assert full.roles["ref"] is not full.roles["actor"]


# ---- saving in the background -----------------------------------------------------------------------------------

ASYNC = [*KL, "actor_rollout_ref.actor.checkpoint.async_save=true"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[], pytest.param(RANKS, marks=pytest.mark.slow)])
def test_a_run_resumes_from_a_checkpoint_written_in_the_background(ranks, settings, tmp_path):
    straight = run(settings, *ASYNC, *ranks, "trainer.save_freq=2", steps=4)
    folder = tmp_path / "run"
    assert steps_in(folder) == [2, 4]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    again = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder / 'global_step_2'}"]
    resumed = run(settings, *ASYNC, *ranks, *again, steps=4)
    assert resumed == straight[2:]


class Gate:
    """Holds every write of shards until it is opened."""

    def __init__(self, monkeypatch):
        self.opened, write = threading.Event(), ShardWriter.write
        monkeypatch.setattr(ShardWriter, "write", lambda shards: self.opened.wait() and write(shards))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "global_step" in path.name)


def test_it_counts_when_all_of_it_is_written(settings, tmp_path, monkeypatch):
    gate, run_folder, seen = Gate(monkeypatch), tmp_path / "run", []
    trainer = LocalPPOTrainer(overrides=[*settings, *ASYNC, "trainer.save_freq=1", "trainer.total_training_steps=5"])
    checkpointer = trainer.checkpointer
    checkpointer.save = lambda step, is_due: step in (1, 4, 5) and Checkpointer.save(checkpointer, step, is_due)

    def look(report: StepReport) -> None:
        seen.append(names(run_folder))
        if report.step == 1:
            threading.Timer(0.2, gate.opened.set).start()
            wait_until(lambda: checkpointer._is_written())
        elif report.step == 2:  # its checksums are computed
            wait_until(lambda: checkpointer._pending.sealing.done())

    trainer.on_step.append(look)
    trainer.fit()
    assert seen[:3] == [[".writing_global_step_1"]] * 2 + [["global_step_1"]]
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.endswith("(report)")])
    assert names(run_folder) == ["global_step_1", "global_step_4", "global_step_5"]


def test_a_write_that_fails_stops_the_run_and_leaves_the_checkpoints_of_before(settings, tmp_path, monkeypatch):
    run(settings, *ASYNC, "trainer.save_freq=1", steps=1)
    write = ShardWriter.write

    def fail(shards: ShardWriter) -> None:
        write(shards)
        raise OSError("the disk is full")

    monkeypatch.setattr(ShardWriter, "write", fail)
    with pytest.raises(OSError, match="the disk is full") as error:
        run(settings, *ASYNC, "trainer.save_freq=2", steps=6)
    assert "The checkpoint of step 2 was not written" in "".join(error.value.__notes__)
    assert names(tmp_path / "run") == ["global_step_1"]


@pytest.mark.fast("2-1-kept1")
@pytest.mark.parametrize(
    ("steps", "signals", "kept"),  # waited for at the end, and by the next save
    [(1, 1, ["global_step_1"]), (2, 1, ["global_step_1", "global_step_2"]), (1, 2, [])],
)
def test_a_second_sigint_discards_the_checkpoint_that_is_waited_for(
    steps, signals, kept, settings, tmp_path, monkeypatch
):
    monkeypatch.setattr("verl.trainer.guards.interruption.REPEAT_SECONDS", 0.1)
    gate = Gate(monkeypatch)
    given = [*ASYNC, "trainer.save_freq=1", f"trainer.total_training_steps={steps}"]
    trainer = LocalPPOTrainer(overrides=[*settings, *given])
    checkpointer = trainer.checkpointer
    wait = checkpointer.wait

    def interrupted() -> None:
        if checkpointer._pending is not None:
            checkpointer.wait = wait
            for number in range(signals):
                threading.Timer(0.1 + 0.2 * number, os.kill, (os.getpid(), signal.SIGINT)).start()
            threading.Timer(0.6, gate.opened.set).start()
        wait()

    checkpointer.wait = interrupted
    if signals == 1:  # all steps are done: a normal end
        trainer.fit()
    else:
        with pytest.raises(Stopped) as stop:
            trainer.fit()
        assert not stop.value.finished
    assert [name for name in names(tmp_path / "run") if not name.startswith(".")] == kept


def test_a_run_that_fails_keeps_the_checkpoint_that_it_was_writing(settings, tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    trainer = LocalPPOTrainer(overrides=[*settings, *ASYNC, "trainer.save_freq=1", "trainer.total_training_steps=3"])

    def fail(report: StepReport) -> None:
        threading.Timer(0.2, gate.opened.set).start()
        raise RuntimeError("from the user's callback")

    trainer.on_step.append(fail)
    with pytest.raises(RuntimeError, match="from the user's callback"):
        trainer.fit()
    assert names(tmp_path / "run") == ["global_step_1"]
