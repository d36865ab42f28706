"""Default names: the same command has the same folder, another experiment another one."""

import pytest

from verl.config import Config, dump_config, load_config, to_flat_dict
from verl.config.fields import fields_of
from verl.config.naming import is_defining
from verl.config.schema import SFTConfig

GIVEN = [
    "data.train_files=~/data/gsm8k/train.parquet",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "algorithm.adv_estimator=grpo",
]
MODEL = "actor_rollout_ref.model.path="


def folder(*overrides: str, schema=Config) -> str:
    return load_config(overrides=overrides, schema=schema).trainer.default_local_dir


def test_names_say_data_algorithm_and_model():
    trainer = load_config(overrides=GIVEN).trainer
    assert trainer.project_name == "gsm8k"
    stem, digest = trainer.experiment_name.rsplit("-", 1)
    assert stem == "grpo-Qwen2.5-0.5B-Instruct" and len(digest) == 6
    assert trainer.default_local_dir == f"checkpoints/gsm8k/{trainer.experiment_name}"


OTHER_EXPERIMENTS = ["actor_rollout_ref.model.path=other", "data.train_files=[b/gsm8k/train.parquet]"]
OTHER_EXPERIMENTS += ["data.train_batch_size=32", "algorithm.adv_estimator=rloo", "algorithm.gamma=0.9"]
OTHER_EXPERIMENTS += ["actor_rollout_ref.actor.optim.lr=1e-4", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"]
OTHER_EXPERIMENTS += ["actor_rollout_ref.rollout.n=16", "reward.custom_reward_function.path=reward.py"]
OTHER_EXPERIMENTS += ["trainer.seed=7"]


@pytest.mark.parametrize("change", OTHER_EXPERIMENTS)
def test_another_experiment_has_another_folder(change):
    assert folder(*GIVEN, change) != folder(*GIVEN)


@pytest.mark.parametrize(
    "change",
    [
        "trainer.total_epochs=3",
        "trainer.total_training_steps=7",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[console]",
        "trainer.save_freq=5",
        "trainer.seed=42",  # the default
        "actor_rollout_ref.actor.optim.lr=0.000001",  # the default, 1e-6
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.rollout.name=vllm",
        "data.val_files=[v.parquet]",
        "placement.rollout_devices=[1]",
    ],
)
def test_speed_length_and_output_leave_the_folder(change):
    assert folder(*GIVEN, change) == folder(*GIVEN)


def test_given_names_keep_their_meaning():
    assert folder(*GIVEN, "trainer.project_name=p", "trainer.experiment_name=e") == "checkpoints/p/e"
    assert folder(*GIVEN, "trainer.default_local_dir=out") == "out"
    name = load_config(overrides=GIVEN).trainer.experiment_name
    assert folder(*GIVEN, "trainer.project_name=p") == f"checkpoints/p/{name}"
    reference = "trainer.default_local_dir=/runs/${trainer.project_name}/${trainer.experiment_name}"
    assert folder(*GIVEN, reference) == f"/runs/gsm8k/{name}"


PROJECTS = {"[openai/gsm8k]": "gsm8k", "[tasks/reverse.jsonl]": "reverse"}
PROJECTS |= {"[tiny/data/train-00000-of-00002.parquet,tiny/data/train-00001-of-00002.parquet]": "tiny"}
PROJECTS |= {"[openai/gsm8k,data/maths/train.parquet]": "gsm8k+maths", "[train.parquet]": "data", "[]": "data"}


@pytest.mark.parametrize(("files", "project"), PROJECTS.items())
def test_the_project_is_named_after_the_data(files, project):
    assert load_config(overrides=[f"data.train_files={files}"]).trainer.project_name == project


def test_a_checkpoint_of_this_library_is_named_after_its_run():
    name = load_config(overrides=[MODEL + "out/sft/global_step_40/actor/huggingface"]).trainer.experiment_name
    assert name.startswith("ppo-sft-")


def test_fine_tuning():
    given = ["data.train_files=[x/reverse.jsonl]", "model.path=tiny/llama"]
    assert folder(*given, schema=SFTConfig).startswith("checkpoints/reverse/sft-llama-")
    assert folder(*given, "optim.lr=1e-3", schema=SFTConfig) != folder(*given, schema=SFTConfig)
    assert folder(*given, "engine.param_offload=true", schema=SFTConfig) == folder(*given, schema=SFTConfig)


def test_a_saved_configuration_has_the_same_folder(tmp_path):
    config = load_config(overrides=[*GIVEN, "algorithm.gamma=0.9"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert Config.model_validate(config.model_dump()) == config
    assert "experiment_name" not in dump_config(config)


def test_every_setting_is_on_one_side():
    """A reminder for new settings: these sections define an experiment, except what naming.py excludes."""
    sides = {True: set(), False: set()}
    for key in [*fields_of(Config), *fields_of(SFTConfig)]:
        sides[is_defining(key)].add(key)
    assert {"algorithm.gamma", "reward.reward_function", "data.train_files", "optim.lr"} <= sides[True]
    assert {"trainer.total_epochs", "checkpoint.async_save", "engine.param_offload"} <= sides[False]
    assert to_flat_dict(Config()).keys() <= sides[True] | sides[False]
