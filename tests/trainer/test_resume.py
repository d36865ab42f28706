"""A run that was stopped and resumed gives the numbers of one that was not, to the last digit."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl.trainer.local_trainer import LocalPPOTrainer


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """step -> everything that was logged of it, except what a clock measured."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        clock = ("time", "timing_s/", "perf/", "rollout/tokens_per_second")
        kept = {name: value for name, value in record.items() if not name.startswith(clock)}
        found.setdefault(record["step"], {}).update(kept)
    return found


ALGORITHMS = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    # everything that has state: critic, reference, adaptive KL, cosine schedule, shuffled mini-batches, two epochs
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
        "actor_rollout_ref.actor.optim.total_training_steps=9",
    ],
}


@pytest.mark.parametrize(
    ("algorithm", "stop"),  # inside an epoch of 6 steps, and on its boundary
    [
        ("ppo", 4),
        pytest.param("ppo", 6, marks=pytest.mark.slow),
        pytest.param("grpo", 4, marks=pytest.mark.slow),
        ("grpo", 6),
    ],
)
def test_resumed_is_bit_equal_to_uninterrupted(algorithm, stop, settings, tmp_path):
    run = tmp_path / "run"
    chosen = [*settings, *ALGORITHMS[algorithm], "trainer.save_freq=2", "trainer.test_freq=4"]
    last = stop + 2
    LocalPPOTrainer(overrides=[*chosen, f"trainer.total_training_steps={last}"]).fit()
    straight = metrics_of(run)
    assert sorted(straight) == list(range(1, last + 1))
    shutil.rmtree(run)
    LocalPPOTrainer(overrides=[*chosen, f"trainer.total_training_steps={stop}"]).fit()
    LocalPPOTrainer(overrides=[*chosen, f"trainer.total_training_steps={last}"]).fit()
    resumed = metrics_of(run)
    for step in range(1, last + 1):
        if step != stop:  # there the short run validated, being at its end
            assert resumed[step] == straight[step], step
        else:
            assert resumed[step].items() >= straight[step].items()


def test_a_finished_run_says_that_there_is_nothing_to_do(settings, caplog):
    chosen = [*settings, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2", "trainer.save_freq=2"]
    LocalPPOTrainer(overrides=chosen).fit()
    trainer = LocalPPOTrainer(overrides=chosen)
    trainer.fit()
    assert trainer.global_step == 2
    assert "nothing to train" in caplog.text


def test_a_checkpoint_is_kept_whole_and_changed_settings_are_named(settings, tmp_path, caplog):
    chosen = [*settings, "algorithm.adv_estimator=grpo", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=3"]).fit()
    run = tmp_path / "run"
    assert sorted(p.name for p in run.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    assert (run / "global_step_3" / "actor" / "huggingface" / "tokenizer.json").is_file()
    weights = run / "global_step_3" / "actor" / "huggingface" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    trainer = LocalPPOTrainer(
        overrides=[*chosen, "trainer.total_training_steps=4", "actor_rollout_ref.actor.optim.lr=2e-3"]
    )
    trainer.fit()
    assert "global_step_3" in caplog.text  # refused by name
    assert "actor_rollout_ref.actor.optim.lr: 0.001 -> 0.002" in caplog.text
    assert sorted(p.name for p in run.glob("global_step_*"))[-1] == "global_step_4"


def test_resuming_with_another_model_is_refused(settings, tiny, tmp_path):
    from examples.quickstart.tiny_model import tiny_model

    chosen = [*settings, "algorithm.adv_estimator=grpo", "trainer.save_freq=1"]
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=1"]).fit()
    other = tiny_model("llama", tmp_path / "other", seed=0, size="mini")
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    with pytest.raises(ValueError, match="a different model"):
        LocalPPOTrainer(
            overrides=[*chosen, "trainer.total_training_steps=2", f"actor_rollout_ref.model.path={other}"]
        ).fit()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before


def test_a_learning_rate_that_was_changed_is_the_one_that_is_used(settings, tmp_path):
    """With a rate of 0 nothing moves any more, whatever rate the checkpoint was written with."""
    chosen = [*settings, "algorithm.adv_estimator=grpo", "trainer.save_freq=1"]
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=2"]).fit()
    optim = "actor_rollout_ref.actor.optim."
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=3", f"{optim}lr=0"]).fit()
    other = LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=4", f"{optim}weight_decay=0.25"])
    groups = []
    other.on_step.append(lambda _: groups.extend(other.roles["actor"].worker.engine.optimizer.param_groups))
    other.fit()
    weights = [load_file(tmp_path / f"run/global_step_{n}/actor/huggingface/model.safetensors") for n in (1, 2, 3, 4)]
    moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(weights)]
    assert moved == [True, False, True]
    assert [step["actor/lr"] for step in metrics_of(tmp_path / "run").values()] == [1e-3, 1e-3, 0, 1e-3]
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.25, 1e-3)]


def test_a_role_that_the_checkpoint_does_not_have(settings):
    chosen = [*settings, "trainer.save_freq=1"]
    LocalPPOTrainer(overrides=[*chosen, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1"]).fit()
    with pytest.raises(ValueError, match="global_step_1 has no critic: it was written by a run without one"):
        LocalPPOTrainer(overrides=[*chosen, "algorithm.adv_estimator=gae", "trainer.total_training_steps=2"]).fit()


KL = ["actor_rollout_ref.actor.use_kl_loss=true"]  # as with algorithm.name=grpo


def test_a_run_without_a_name_resumes_itself_and_no_other_experiment(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = [s for s in settings if not s.startswith("trainer.default_local_dir")]
    plain += ["trainer.save_freq=1", "trainer.total_training_steps=1"]
    grpo = LocalPPOTrainer(overrides=[*plain, "algorithm.name=grpo"])
    grpo.fit()
    other = LocalPPOTrainer(overrides=[*plain, "algorithm.adv_estimator=rloo", *KL])
    assert other.folder.parent == grpo.folder.parent and other.folder != grpo.folder
    other.fit()
    assert other.global_step == 1 and other.checkpointer.newest().endswith(f"{other.folder}/global_step_1")
    same = LocalPPOTrainer(overrides=[*plain, "algorithm.name=grpo", "trainer.total_training_steps=2"])
    assert same.folder == grpo.folder
    same.fit()
    assert (grpo.folder / "global_step_2").is_dir() and not (other.folder / "global_step_2").is_dir()


def test_a_training_file_that_has_changed_is_named(settings, tiny, tmp_path, caplog):
    file = tmp_path / "train.jsonl"
    file.write_text((tiny / "train.jsonl").read_text())
    chosen = [*settings, f"data.train_files={file}", "algorithm.name=grpo", "trainer.save_freq=1"]
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=1"]).fit()
    before = file.stat().st_size
    file.write_text(file.read_text().replace('"answer": ', '"answer":  ', 1))
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=2"]).fit()
    assert (
        f"the training data has changed since the checkpoint (bytes of the files: {before} -> bytes of the files: "
        f"{before + 1})"
    ) in caplog.text
