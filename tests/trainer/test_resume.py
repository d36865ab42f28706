"""A run that was stopped and resumed gives the numbers of one that was not, to the last digit."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.quickstart.tiny_model import tiny_model
from tests.trainer.conftest import run_settings
from tests.trainer.runs import metrics_of, steps_in
from verl.config import Config, load_config, to_flat_dict
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.state import identity

MODEL = "actor_rollout_ref.model.path=none"
GRPO = ["algorithm.adv_estimator=grpo", "trainer.save_freq=1"]

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


@pytest.mark.fast("ppo-4")
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
    run, last = tmp_path / "run", stop + 2
    chosen = [*settings, *ALGORITHMS[algorithm], f"trainer.save_freq={stop}", "trainer.test_freq=4"]
    chosen.append(f"trainer.total_training_steps={last}")
    LocalPPOTrainer(overrides=chosen).fit()
    straight = metrics_of(run)
    assert sorted(straight) == list(range(1, last + 1)) and steps_in(run) == [stop]
    LocalPPOTrainer(overrides=chosen).fit()  # as if the run had been killed in its last step
    assert metrics_of(run) == straight
    dropped = [json.loads(line)["step"] for line in (run / "metrics.dropped.jsonl").read_text().splitlines()]
    assert sorted({*dropped}) == [stop + 1, last]


@pytest.fixture(scope="module")
def first_step(tiny, tmp_path_factory) -> Path:
    """The folder of a run of one step of GRPO."""
    run = tmp_path_factory.mktemp("first") / "run"
    LocalPPOTrainer(overrides=[*run_settings(tiny, run), *GRPO, "trainer.total_training_steps=1"]).fit()
    return run


@pytest.fixture
def saved(first_step, settings, tmp_path) -> list[str]:
    """The settings of a run that has made one step."""
    shutil.copytree(first_step, tmp_path / "run", symlinks=True)
    return [*settings, *GRPO]


def test_a_finished_run_says_that_there_is_nothing_to_do(saved, caplog):
    trainer = LocalPPOTrainer(overrides=[*saved, "trainer.total_training_steps=1"])
    trainer.fit()
    assert trainer.global_step == 1 and "nothing to train" in caplog.text


@pytest.mark.slow
def test_a_checkpoint_is_kept_whole_and_changed_settings_are_named(settings, tmp_path, caplog):
    chosen = [*settings, "algorithm.adv_estimator=grpo", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    LocalPPOTrainer(overrides=[*chosen, "trainer.total_training_steps=3"]).fit()
    run = tmp_path / "run"
    assert steps_in(run) == [2, 3]
    assert (run / "global_step_3" / "actor" / "huggingface" / "tokenizer.json").is_file()
    weights = run / "global_step_3" / "actor" / "huggingface" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    trainer = LocalPPOTrainer(
        overrides=[*chosen, "trainer.total_training_steps=4", "actor_rollout_ref.actor.optim.lr=2e-3"]
    )
    trainer.fit()
    assert "global_step_3" in caplog.text  # refused by name
    assert "actor_rollout_ref.actor.optim.lr: 0.001 -> 0.002" in caplog.text
    assert steps_in(run)[-1] == 4


def test_resuming_with_another_model_is_refused(saved, tmp_path):
    other = tiny_model("llama", tmp_path / "other", seed=0, size="mini")
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    changed = [f"actor_rollout_ref.model.path={other}", "trainer.allow_change=[model]"]
    with pytest.raises(ValueError, match="a different model"):
        LocalPPOTrainer(overrides=[*saved, "trainer.total_training_steps=2", *changed]).fit()
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


def test_a_role_that_the_checkpoint_does_not_have(saved):
    allowed = ["trainer.allow_change=[algorithm.*]", "trainer.total_training_steps=2"]
    with pytest.raises(ValueError, match="global_step_1 has no critic: it was written by a run without one"):
        LocalPPOTrainer(overrides=[*saved, "algorithm.adv_estimator=gae", *allowed]).fit()


KL = ["actor_rollout_ref.actor.use_kl_loss=true"]  # as with algorithm.name=grpo


@pytest.mark.slow
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


def refused(chosen: list[str], step: int, *changes: str) -> str:
    """The error of resuming with these changes to step `step`; empty: it resumes."""
    try:
        LocalPPOTrainer(overrides=[*chosen, f"trainer.total_training_steps={step}", *changes]).fit()
    except ValueError as error:
        return str(error)
    return ""


def test_another_experiment_is_refused_with_the_differences(saved, tiny, tmp_path, caplog):
    model, file, reward = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "reward.py"
    shutil.copytree(tiny / "model", model)
    file.write_text((tiny / "train.jsonl").read_text())
    reward.write_text((tiny / "reward.py").read_text())
    chosen = [*saved, f"data.train_files={file}", f"actor_rollout_ref.model.path={model}"]
    chosen.append(f"reward.custom_reward_function.path={reward}")
    assert "\n  algorithm.adv_estimator: grpo -> rloo\n" in refused(chosen, 2, "algorithm.adv_estimator=rloo")
    error = refused(chosen, 2, "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg")
    assert "rollout.n: 2 -> 4\n" in error and "policy_loss.loss_mode: vanilla -> gpg\n" in error
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor + 0.001 for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"})
    file.write_text(file.read_text().replace('"answer": "', '"answer": "x', 1))
    reward.write_text(reward.read_text() + "# edited\n")
    error = refused(chosen, 2)
    assert "\n  model: model.safetensors has other contents\n" in error
    assert "\n  data: train.jsonl has other contents\n" in error
    assert "\n  reward: reward.py has other contents\n" in error
    assert error.endswith("set trainer.allow_change=[model,data,reward]")
    assert "found 'modl': did you mean 'model'?" in refused(chosen, 2, "trainer.allow_change=[modl]")
    assert steps_in(tmp_path / "run") == [1]
    caplog.clear()
    assert refused(chosen, 2, "trainer.allow_change=[model,data,reward]") == ""
    assert "allowed change of the experiment: model: model.safetensors has other contents; the KL ref" in caplog.text


def test_the_same_files_elsewhere_and_tuned_settings_are_the_same_experiment(saved, tiny, tmp_path, caplog):
    shutil.copytree(tiny / "model", tmp_path / "copy")
    shutil.copy(tiny / "train.jsonl", tmp_path / "renamed.jsonl")
    moved = [f"actor_rollout_ref.model.path={tmp_path / 'copy'}", f"data.train_files={tmp_path / 'renamed.jsonl'}"]
    assert refused(saved, 2, *moved, "actor_rollout_ref.actor.optim.lr=2e-3") == ""
    assert "actor_rollout_ref.actor.optim.lr: 0.001 -> 0.002" in caplog.text


def check_resume(before: Config, after: Config, folder: Path, saved: dict | None = None) -> None:
    """Raise ValueError if a run with one configuration may not resume that of another. saved: its fingerprints."""
    saved = identity.Identity(before, folder).state() if saved is None else saved
    identity.Identity(after, folder).check(saved, to_flat_dict(before), folder)


def test_a_folder_of_data_is_compared_by_its_files(tmp_path):
    """Not only its path, and without the caches that the datasets library writes into it."""
    for name in ("a", "b", "c"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "train.jsonl").write_text('{"prompt": "a"}\n' * (1 + (name == "c")))
    (tmp_path / "b" / "cache-1.arrow").write_text("1")
    experiments = {name: load_config(overrides=[f"data.train_files={tmp_path / name}", MODEL]) for name in "abc"}
    check_resume(experiments["a"], experiments["b"], tmp_path)
    with pytest.raises(ValueError, match=r"\n  data: train.jsonl has other contents\n"):
        check_resume(experiments["a"], experiments["c"], tmp_path)


def test_a_critic_that_starts_from_a_copy_of_the_policy_is_the_same_experiment(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "copy")
    settings = [f"data.train_files={tiny / 'train.jsonl'}", f"actor_rollout_ref.model.path={tiny / 'model'}"]
    one = load_config(overrides=[*settings, "algorithm.adv_estimator=gae"])
    other = load_config(overrides=[*settings, "algorithm.adv_estimator=gae", f"critic.model.path={tmp_path / 'copy'}"])
    check_resume(one, other, tmp_path)
    (tmp_path / "copy" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"\n  model: config.json is new\n"):
        check_resume(one, other, tmp_path)


def test_edited_tools_are_refused(tiny, tmp_path):
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools: []\n")
    config = load_config(
        overrides=[MODEL, f"data.train_files={tiny / 'train.jsonl'}", f"data.tool_config_path={tools}"]
    )
    saved = identity.Identity(config, tmp_path).state()
    tools.write_text("tools: [{}]\n")
    with pytest.raises(ValueError, match=r"\n  code: tools.yaml has other contents\n"):
        check_resume(config, config, tmp_path, saved)


def test_custom_code_that_moved_is_the_same_and_another_module_is_not(tiny, tmp_path, caplog):
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "custom.py").write_text("x = 1\n")
    before, moved, other = (
        load_config(overrides=[MODEL, f"data.train_files={tiny / 'train.jsonl'}", f"imports=[{tmp_path / text}]"])
        for text in ("old/custom.py,json", "new/custom.py,json", "new/custom.py,csv")
    )
    check_resume(before, moved, tmp_path)
    assert "imports" not in caplog.text
    check_resume(before, other, tmp_path)
    assert "imports: " in caplog.text


def test_another_reward_file_is_refused_without_fingerprints(tiny, tmp_path):
    """In a checkpoint of a version that stored none, the paths are compared."""
    key = "reward.custom_reward_function.path"
    one, other = (
        load_config(overrides=[MODEL, f"data.train_files={tiny / 'train.jsonl'}", f"{key}={tiny / name}"])
        for name in ("reward.py", "other.py")
    )
    with pytest.raises(ValueError, match=rf"\n  {key}: .*reward.py -> .*other.py\n"):
        check_resume(one, other, tmp_path, {})


def test_only_code_is_compared_as_code(tiny, tmp_path):
    files = [f"data.train_files={tiny / 'train.jsonl'}", f"data.val_files={tiny / 'test.jsonl'}"]
    given = [MODEL, *files, f"reward.custom_reward_function.path={tiny / 'reward.py'}"]
    found = identity.Identity(load_config(overrides=[*given, "trainer.experiment_name=a.py"]), tmp_path)._files()
    names = {group: [path.name for path in paths] for group, paths in found.items() if paths}
    assert names == {"data": ["train.jsonl"], "reward": ["reward.py"]}


def test_large_files_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "_BLOCK_BYTES", 10)
    file = tmp_path / "weights.safetensors"
    contents = bytearray(range(250)) * 20  # 5,000 bytes: the blocks start at (5000 - 10) * i // 63
    file.write_bytes(contents)
    first = identity.fingerprint(file)
    # 2376: the block 30, which does not start there if there is one block more or less
    for position, is_seen in ((0, True), (4999, True), (79, True), (2376, True), (20, False)):
        changed = bytearray(contents)
        changed[position] ^= 1
        file.write_bytes(changed)
        assert (identity.fingerprint(file)[3] != first[3]) == is_seen, position


def test_settings_that_the_version_of_the_checkpoint_did_not_have_are_no_change(tiny, tmp_path, caplog):
    """One of the experiment and a free one; their defaults are what the checkpoint was trained with."""
    settings = [f"data.train_files={tiny / 'train.jsonl'}", f"actor_rollout_ref.model.path={tiny / 'model'}"]
    saved = to_flat_dict(load_config(overrides=settings))
    for key in ("algorithm.norm_adv_by_std_in_grpo", "trainer.max_restarts"):
        del saved[key]
    config = load_config(overrides=settings)
    identity.Identity(config, tmp_path).check(identity.Identity(config, tmp_path).state(), saved, tmp_path)
    assert "changed since" not in caplog.text
    other = load_config(overrides=[*settings, "algorithm.norm_adv_by_std_in_grpo=false"])
    with pytest.raises(ValueError, match=r"algorithm\.norm_adv_by_std_in_grpo: None -> False"):
        identity.Identity(other, tmp_path).check({}, saved, tmp_path)


def test_other_versions_of_packages_are_logged(tmp_path, caplog):
    config = load_config()
    now = identity.Identity(config, tmp_path).state()["packages"]
    before = {**now, "torch": "1.0", "vllm": "0.1"}
    check_resume(config, config, tmp_path, {**identity.Identity(config, tmp_path).state(), "packages": before})
    changed = [f"torch: 1.0 -> {now['torch']}", f"vllm: 0.1 -> {now.get('vllm')}"]
    assert caplog.messages == [f"changed since the checkpoint, the new values are used: {', '.join(changed)}"]
