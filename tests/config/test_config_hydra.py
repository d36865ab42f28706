"""Hydra's forms: --config-path and --config-name, groups, defaults lists, interpolations."""

import re

import pytest

from verl.config import ConfigError, load_config
from verl.config.public.hydra import read_file
from verl.config.schema import SFTConfig
from verl.trainer.main_ppo import main
from verl.trainer.startup.command_line import split_arguments

RECIPE = """
hydra:
  searchpath: [file://verl/trainer/config]
  run: {dir: "outputs/${now:%Y-%m-%d}"}
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  train_batch_size: 64
trainer:
  n_gpus_per_node: ${oc.select:data.gpus,2}
  experiment_name: run-${oc.env:RUN_NAME,none}
  project_name: ${.experiment_name}-project
"""


def refused(*arguments, **kwargs):
    with pytest.raises(ConfigError) as error:
        load_config(*arguments, **kwargs)
    return [str(problem) for problem in error.value.problems]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        ["--config-path={}", "--config-name=recipe"],
        ["--config-path", "{}", "--config-name", "recipe.yaml"],
        ["-cp", "{}", "-cn", "recipe"],
        ["--config-dir={}", "--config-name=recipe"],
    ],
)
def test_a_configuration_by_folder_and_name(options, folder):
    arguments = [option.format(folder) for option in options]
    path, overrides, _ = split_arguments([*arguments, "data.train_batch_size=32"])
    config = load_config(path, overrides)
    assert (config.data.max_prompt_length, config.data.train_batch_size) == (1024, 32)
    assert (config.trainer.n_gpus_per_node, config.trainer.experiment_name) == (2, "run-none")
    assert config.trainer.project_name == "run-none-project"


@pytest.mark.parametrize(
    ("name", "selected"),
    [
        *((name, []) for name in ("ppo_trainer", "ppo_trainer.yaml", "sft_trainer_engine")),  # the defaults
        ("ppo_megatron_trainer", ["@=ppo_megatron_trainer"]),
    ],
)
def test_configurations_of_upstream_need_no_file(name, selected):
    path, overrides, _ = split_arguments(["--config-path=config", f"--config-name={name}", "data.seed=1"])
    assert (path, overrides) == (None, [*selected, "data.seed=1"])


def test_a_configuration_that_is_not_there_or_not_supported(folder):
    for arguments, message in {
        (f"--config-path={folder}", "--config-name=nothing"): f"there is no nothing.yaml in {folder}",
        (f"--config-path={folder}",): "set --config-name to the name of the file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            split_arguments(list(arguments))
    with pytest.raises(ValueError, match="not both"):
        split_arguments(["--config", "a.yaml", "--config-name", "b"])
    with pytest.raises(ValueError, match="--multirun is not supported"):
        split_arguments(["--multirun"])


def test_cfg_prints_the_configuration(capsys):
    assert main(["--cfg", "job", "--config-name=ppo_trainer", "data.seed=77"]) == 0
    assert "seed: 77" in capsys.readouterr().out


SUPPORTED = ["model_engine=dp", "actor@actor_rollout_ref.actor=dp_actor", "ref@actor_rollout_ref.ref=dp_ref"]
SUPPORTED += ["critic@critic=dp_critic", "model@actor_rollout_ref.model=hf_model", "data@data=legacy_data"]
SUPPORTED += ["data=legacy_data", "reward_model=dp_reward_model"]


@pytest.mark.parametrize("group", SUPPORTED)
def test_groups_that_select_what_is_supported(group, caplog):
    assert load_config(overrides=[group]) == load_config()
    assert caplog.messages == []


def test_groups_of_sft(tmp_path):
    overrides = ["engine=fsdp", "optim=fsdp", "model=hf_model", "engine.fsdp_size=2", "optim.lr=1e-4"]
    config = load_config(overrides=overrides, schema=SFTConfig)
    assert (config.engine.fsdp_size, config.optim.lr) == (2, 1e-4)
    (problem,) = refused(overrides=["engine=other"], schema=SFTConfig)
    assert problem == "engine (override 'engine=other'): engine=other is not known: use fsdp"


@pytest.mark.parametrize(
    ("option", "roles"),
    [
        ("model_engine=megatron", ("megatron", "megatron", "megatron")),
        ("actor@actor_rollout_ref.actor=megatron_actor", ("megatron", "megatron", "megatron")),
        ("ref@actor_rollout_ref.ref=megatron_ref", ("fsdp", "megatron", "fsdp")),
        ("critic@critic=megatron_critic", ("fsdp", "fsdp", "megatron")),
    ],
)
def test_groups_that_select_megatron(option, roles):
    sizes = ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
    config = load_config(overrides=[option, *sizes])
    policy = config.actor_rollout_ref
    assert (policy.actor.strategy, policy.ref.strategy, config.critic.strategy) == roles
    assert policy.ref.megatron.tensor_model_parallel_size == config.critic.megatron.tensor_model_parallel_size == 2


ENGINES = ["model_engine=torchtitan", "@=ppo_veomni_trainer", "actor@actor_rollout_ref.actor=veomni_actor"]
ENGINES += ["actor_rollout_ref.actor.strategy=mlite"]


@pytest.mark.parametrize("option", ENGINES)
def test_engines_that_decide_speed_only_are_fsdp(option, caplog):
    """With the sizes and the schedules of their own sections."""
    name = "torchtitan" if "titan" in option else "veomni"
    size = "context_parallel_size" if name == "torchtitan" else "ulysses_parallel_size"
    sizes = [f"actor_rollout_ref.actor.{name}.{size}=2", "trainer.n_gpus_per_node=2"]
    actor = load_config(overrides=[option, *sizes, "algorithm.name=grpo"]).actor_rollout_ref.actor
    assert (actor.strategy, actor.fsdp_config.ulysses_sequence_parallel_size) == ("fsdp", 2)
    expected = {"torchtitan": "linear"}.get(name, "constant" if "mlite" in option else "cosine")
    assert actor.optim.lr_scheduler_type == expected
    assert "sets actor_rollout_ref.actor.strategy: fsdp" in caplog.text


def test_other_engines_of_sft():
    overrides = [
        "engine=automodel",
        "optim=automodel",
        "engine.cp_size=2",
        "trainer.n_gpus_per_node=2",
        "optim.lr=1e-4",
    ]
    config = load_config(overrides=overrides, schema=SFTConfig)
    assert (config.engine.strategy, config.engine.ulysses_sequence_parallel_size) == ("fsdp", 2)
    optim = config.optim
    assert (optim.lr_scheduler_type, optim.min_lr_ratio, optim.lr_warmup_init_ratio) == ("cosine", 0.01, 0.1)


def test_groups_that_select_what_is_not_supported():
    found = refused(overrides=["actor@actor_rollout_ref.actor=other_actor", "rollout=x", "a@b.c=d", "data.sed=1"])
    assert [problem.partition("): ")[2] for problem in found] == [
        "actor=other_actor is not known: use dp_actor or actor",
        "rollout=x is not known: use rollout",
        "there is no group 'a'",
        "unknown key; did you mean data.seed?",
    ]


def test_groups_and_files_of_the_users_folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "maths.yaml").write_text("max_prompt_length: 7\nseed: 7\n")
    (tmp_path / "length").mkdir()
    (tmp_path / "length" / "long.yaml").write_text("# @package _global_\ndata: {max_response_length: 9}\n")
    (tmp_path / "common.yaml").write_text("data: {seed: 1, train_batch_size: 16}\n")
    main_file = tmp_path / "main.yaml"
    main_file.write_text(
        "defaults:\n  - ppo_trainer\n  - common\n  - optional length: long\n  - override hydra/job_logging: none\n"
        "  - actor@actor_rollout_ref.actor: ${model_engine}_actor\n  - _self_\ndata: {seed: 2}\n"
    )
    config = load_config(main_file)
    assert (config.data.seed, config.data.train_batch_size, config.data.max_response_length) == (2, 16, 9)
    config = load_config(main_file, ["data=maths", "data.seed=3"])
    assert (config.data.seed, config.data.max_prompt_length) == (3, 7)


def test_what_stands_after_self_wins_over_the_file(tmp_path):
    (tmp_path / "common.yaml").write_text("data: {seed: 1}\n")
    (tmp_path / "main.yaml").write_text("defaults: [_self_, common]\ndata: {seed: 2}\n")
    assert load_config(tmp_path / "main.yaml").data.seed == 1


def test_a_defaults_list_that_selects_what_is_not_supported(tmp_path):
    file = tmp_path / "main.yaml"
    file.write_text("defaults:\n  - model_engine: other\n  - _self_\n")
    assert "model_engine=other is not known" in refused(file)[0]
    file.write_text("data: {seed: 1}\ndefaults:\n  - nothing\n")
    assert refused(file)[0].startswith("defaults (main.yaml line 2): nothing is not known")


def test_files_that_include_themselves(tmp_path):
    (tmp_path / "a.yaml").write_text("defaults: [b, _self_]\n")
    (tmp_path / "b.yaml").write_text("defaults: [c]\n")
    (tmp_path / "c.yaml").write_text("defaults: [b]\n")
    (tmp_path / "self.yaml").write_text("defaults: [self]\n")
    (tmp_path / "twice.yaml").write_text("defaults: [one, one, two]\n")
    (tmp_path / "one.yaml").write_text("data: {seed: 1}\n")
    (tmp_path / "two.yaml").write_text("defaults: [one]\n")
    b, c = tmp_path / "b.yaml", tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match=re.escape(f"a file includes itself: {b} -> {c} -> {b}")):
        read_file(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"self\.yaml -> .*self\.yaml$"):
        read_file(tmp_path / "self.yaml")
    assert len(read_file(tmp_path / "twice.yaml")) == 5
