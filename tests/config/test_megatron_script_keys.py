"""Keys of public verl's scripts for Megatron, asynchronous training and reward models: what each one sets here."""

import logging
import shlex

import pytest

from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from verl.config import ConfigError, load_config
from verl.config.checks.algorithm import may_have_critic
from verl.config.fields import to_flat_dict
from verl.config.schema import SFTConfig
from verl.trainer.ppo.flow import needs_critic
from verl.trainer.startup.command_line import split_arguments

ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
ACTOR, REF, CRITIC = (f"{role}." for role in ROLES)
ROLLOUT, MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
MEGATRON, TRANSFORMER = f"{ACTOR}megatron.", f"+{ACTOR}megatron.override_transformer_config."
OPTIMIZER = f"+{ACTOR}optim.override_optimizer_config."


def load(line, schema=None):
    path, overrides, _ = split_arguments(shlex.split(line))
    config = load_config(path, overrides, **({"schema": schema} if schema else {}))
    return config


SETS = {
    # the optimizer of Megatron
    f"{ACTOR}optim.lr_decay_style=linear": {f"{ACTOR}optim.lr_scheduler_type": "linear"},
    f"{ACTOR}optim.optimizer=adamw critic.optim.optimizer=AdamW8bit critic.optim.optimizer_impl=torchao.optim": {
        "critic.optim.optimizer": "AdamW8bit"
    },
    f"{ACTOR}optim.lr_decay_style=cosine": {f"{ACTOR}optim.lr_scheduler_type": "cosine"},
    f"{ACTOR}optim.lr_decay_steps=50": {f"{ACTOR}optim.total_training_steps": 50},
    f"{ACTOR}optim.lr_decay_steps=null": {f"{ACTOR}optim.total_training_steps": -1},
    f"{ACTOR}optim.lr=2e-6 {ACTOR}optim.min_lr=1e-6": {f"{ACTOR}optim.min_lr_ratio": 0.5},
    f"{ACTOR}optim.min_lr=0": {f"{ACTOR}optim.min_lr_ratio": 0.0},
    f"{ACTOR}optim.lr_warmup_steps=null {ACTOR}optim.lr_warmup_init=0.0": {f"{ACTOR}optim.lr_warmup_steps": -1},
    # the optimizers of other engines
    f"{ACTOR}optim.lr=2e-6 {ACTOR}optim.lr_warmup_init=1e-6 {ACTOR}optim.min_lr_factor=0.5": {
        f"{ACTOR}optim.lr_warmup_init_ratio": 0.5,
        f"{ACTOR}optim.min_lr_ratio": 0.5,
    },
    "critic.optim.lr=4e-5 critic.optim.lr_min=1e-5 critic.optim.lr_start=2e-5 critic.optim.optimizer=FusedAdam": {
        "critic.optim.min_lr_ratio": 0.25,
        "critic.optim.lr_warmup_init_ratio": 0.5,
        "critic.optim.optimizer": "AdamW",
    },
    f"{TRANSFORMER}recompute_modules=[moe_act,mlp]": {
        f"{MEGATRON}override_transformer_config.recompute_modules": ["mlp"]
    },
    "trainer.v1.trainer_mode=colocate_async": {"trainer.async.max_staleness": 0},
    "trainer.log_val_generations=-1": {"trainer.log_val_generations": 0},
    f"""{ACTOR}checkpoint.save_contents="['model']" {REF}megatron.expert_tensor_parallel_size=None""": {
        f"{ACTOR}checkpoint.save_contents": ["model"],
        f"{REF}megatron.expert_tensor_parallel_size": None,
    },
    f"{ACTOR}optim.weight_decay_incr_style=constant {ACTOR}optim.optimizer=adam {ACTOR}optim.lr_wsd_decay_steps=3": {},
    "critic.optim.lr=1e-5 critic.optim.min_lr=1e-5 critic.optim.lr_decay_style=cosine": {
        "critic.optim.min_lr_ratio": 1.0,
        "critic.optim.lr_scheduler_type": "cosine",
    },
    # where the state is between phases
    f"{MEGATRON}offload.param.target=cpu {MEGATRON}offload.optimizer.target=none {MEGATRON}offload.grad.target=null": {
        f"{MEGATRON}param_offload": True,
        f"{MEGATRON}optimizer_offload": False,
        f"{MEGATRON}grad_offload": False,
    },
    f"{REF}megatron.offload.param.target=cpu": {f"{REF}megatron.param_offload": True},
    "critic.megatron.offload.grad.target=cpu": {"critic.megatron.grad_offload": True},
    # keys of the wrong section
    f"{TRANSFORMER}sequence_parallel=False {TRANSFORMER}use_distributed_optimizer=False": {
        f"{MEGATRON}sequence_parallel": False,
        f"{MEGATRON}use_distributed_optimizer": False,
    },
    f"trainer.n_gpus_per_node=2 {TRANSFORMER}context_parallel_size=2": {f"{MEGATRON}context_parallel_size": 2},
    f"trainer.n_gpus_per_node=2 {TRANSFORMER}pipeline_model_parallel_size=2": {
        f"{MEGATRON}pipeline_model_parallel_size": 2
    },
    f"+{MODEL}override_config.model_config.max_position_embeddings=10240": {
        f"{MODEL}override_config": {"max_position_embeddings": 10240}
    },
    f"""+{MODEL}override_config.chat_template='"{{{{ messages }}}}"'""": {
        f"{MODEL}custom_chat_template": "{{ messages }}"
    },
    f"+{ACTOR}model_engine=megatron": {f"{ACTOR}strategy": "megatron", f"{REF}strategy": "megatron"},
    # names of older releases
    f"+{ACTOR}use_gpg_loss=True": {f"{ACTOR}policy_loss.loss_mode": "gpg"},
    f"{ROLLOUT}name=sglang_async": {f"{ROLLOUT}name": "sglang"},
    "reward_model.model_path=rm": {"reward.reward_model.model_path": "rm"},
    # only asynchronous trainers compute no old log-probs with it
    f"+{ACTOR}use_rollout_log_probs=False": {f"{ACTOR}old_log_prob_pass": "auto"},
    f"+{ACTOR}use_rollout_log_probs=True": {f"{ACTOR}old_log_prob_pass": "auto"},
    f"+{ACTOR}use_rollout_log_probs=False async_training.staleness_threshold=0": {
        f"{ACTOR}old_log_prob_pass": "always"
    },
    f"+{ACTOR}use_rollout_log_probs=True async_training.staleness_threshold=0": {f"{ACTOR}old_log_prob_pass": "auto"},
    f"+{ACTOR}tis_imp_ratio_cap=3": {
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 3.0,
    },
    f"+{ACTOR}tis_imp_ratio_cap=-1": {"algorithm.rollout_correction.rollout_is": None},
    "algorithm.rollout_correction.rollout_is_threshold=null": {
        "algorithm.rollout_correction.rollout_is_threshold": 2.0
    },
    f"{MODEL}lora_rank=0 {MODEL}lora_alpha=0": {f"{MODEL}lora_rank": 0},
    # a mini-batch that does not fit a critic which there is not
    f"algorithm.adv_estimator=grpo {ROLLOUT}n=4 trainer.n_gpus_per_node=8 data.train_batch_size=4 "
    f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size=8": {f"{ACTOR}ppo_mini_batch_size": 4},
}


@pytest.mark.parametrize("line", SETS)
def test_the_key_that_a_key_of_public_verl_sets(line, monkeypatch):
    monkeypatch.setattr("verl.utils.packages.is_installed", lambda package: True)
    found = to_flat_dict(load(line))
    assert {key: found[key] for key in SETS[line]} == SETS[line]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (f"{TRANSFORMER}recompute_modules=false", "recompute_modules"),
        ("critic.optim.lr=high critic.optim.min_lr=1e-6", "critic.optim.min_lr"),
    ],
)
def test_a_value_of_the_wrong_type_beside_a_computed_one_is_a_problem(line, key):
    with pytest.raises(ConfigError, match=rf"{key} .*: it, or a key that it depends on, has the wrong type"):
        load(line)


WITHOUT_EFFECT = (
    *(f"{TRANSFORMER}use_{name}=True" for name in ("flash_attn", "fused_rmsnorm", "fused_swiglu", "naive_l2norm")),
    *(f"{TRANSFORMER}{key}" for key in ("attention_softmax_in_fp32=True", "context_parallel_algo=ring", "dsa_topk=4")),
    *(f"{MEGATRON}{key}" for key in ("thd_format=True", "offload.disk.path=/d", "override_ddp_config.bucket_size=9")),
    *(f"{OPTIMIZER}{key}" for key in ("optimizer_cpu_offload=True", "optimizer_offload_fraction=1.0", "fp8_recipe=x")),
    *(f"{role}profile_ranks=[0]" for role in (ACTOR, REF, CRITIC, ROLLOUT)),
    *(f"{ROLLOUT}{key}" for key in ("enable_expert_parallel=True", "moe_tensor_parallel_size=2", "moe_ep_size=4")),
    f"{ROLLOUT}checkpoint_manager_class=recipe.Manager",
    *(f"{MEGATRON}{key}" for key in ("use_dist_checkpointing=True", "override_ddp_config.grad_reduce_in_fp32=False")),
    *(f"{TRANSFORMER}{key}" for key in ("pipeline_model_parallel_layout=Et*2tL", "multi_latent_attention=True")),
    f"{MODEL}mtp.enable=True",
    *("reward.reward_model.rollout.prompt_length=8192", "reward_model.rollout.max_model_len=9"),
    *("reward_model.inference.response_length=1024", "reward_model.use_reward_loop=True"),
    *(f"{ACTOR}mindspeed.tensor_model_parallel_size=2", f"{MODEL}use_prefix_tree=True", "profile.options.level=1"),
    *("trainer.v1.fully_async.feeder_poll_interval=1.0", "async_training.use_dynamic_resource_scaling=True"),
)


@pytest.mark.parametrize("line", WITHOUT_EFFECT)
def test_a_key_without_effect_is_named_in_a_note(line, caplog):
    with caplog.at_level(logging.WARNING, "verl.config"):
        config = load(line)
    assert f"ignored: 1 key without effect here: {line.lstrip('+').split('=')[0]}" in "".join(caplog.messages)
    assert to_flat_dict(config) == to_flat_dict(load(""))


def test_sequences_are_packed_by_megatron(caplog, monkeypatch):
    monkeypatch.setattr("verl.utils.packages.is_installed", lambda package: True)
    with caplog.at_level(logging.WARNING, "verl.config"):
        load(f"model_engine=megatron {MODEL}use_remove_padding=False")
    assert f"{MODEL}use_remove_padding: false has no effect with strategy=megatron" in "".join(caplog.messages)


def test_supervised_fine_tuning_has_the_keys_of_the_optimizer():
    optim = load("optim.lr=2e-6 optim.min_lr=1e-6 optim.lr_decay_style=cosine optim.lr_decay_steps=7", SFTConfig).optim
    assert (optim.min_lr_ratio, optim.lr_scheduler_type, optim.total_training_steps) == (0.5, "cosine", 7)


@pytest.mark.parametrize("estimator", sorted(ADV_ESTIMATOR_REGISTRY))
def test_whether_there_may_be_a_critic(estimator):
    config = load_config(overrides=[f"algorithm.adv_estimator={estimator}"])
    assert may_have_critic(config) == needs_critic(config)


DEVICES = f"{ROLLOUT}nnodes=1 {ROLLOUT}n_gpus_per_node=1"
NAMES = {
    "fully_async_ppo_trainer": (f"{ACTOR}ppo_mini_batch_size=32 {DEVICES}", ("fsdp", 4, 32, True, "naive")),
    "fully_async_ppo_megatron_trainer.yaml": (
        f"{ACTOR}ppo_mini_batch_size=32 rollout.nnodes=1 rollout.n_gpus_per_node=1 data.train_batch_size=0 "
        "data.gen_batch_size=1 async_training.staleness_threshold=0.5 async_training.require_batches=2 "
        "algorithm.rollout_correction.bypass_mode=False",
        ("megatron", 5, 64, False, "naive"),
    ),
    "one_step_off_ppo_trainer": (DEVICES, ("fsdp", 1, 1024, True, "naive")),
    "one_step_off_ppo_megatron_trainer": (
        f"{DEVICES} actor_rollout_ref.hybrid_engine=False",
        ("megatron", 1, 1024, True, "naive"),
    ),
    "dapo_trainer": ("reward_model.reward_manager=naive", ("fsdp", 0, 1024, False, "naive")),
    "dapo_megatron_trainer": ("", ("megatron", 0, 1024, False, "dapo")),
    "transfer_queue_ppo_trainer": ("transfer_queue.enable=True", ("fsdp", 0, 1024, False, "naive")),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_of_public_verl_by_name(name, monkeypatch):
    """Its values are below those of the command line."""
    monkeypatch.setattr("verl.utils.packages.is_installed", lambda package: True)
    line, expected = NAMES[name]
    config = load(f"--config-path=config --config-name={name} {line}")
    assert expected == (
        *(config.actor_rollout_ref.actor.strategy, config.trainer.max_staleness, config.data.train_batch_size),
        *(config.algorithm.rollout_correction.bypass_mode, config.reward.reward_manager.name),
    )


def test_the_folder_of_public_verl_without_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("--config-path=config") == load("")
    (tmp_path / "config").mkdir()
    with pytest.raises(ConfigError, match=r"no ppo_trainer\.yaml"):
        load("--config-path=config")
    with pytest.raises(ConfigError, match=r"--config-name: there is no mine\.yaml in "):
        load("--config-path=config --config-name=mine.yaml")
    with pytest.raises(ConfigError, match=r"staleness \(--config-name=one_step_off_ppo_trainer\): 1, but generation"):
        load("--config-name=one_step_off_ppo_trainer rollout.nnodes=0")
    placement = load("--config-name=one_step_off_ppo_trainer").placement  # its rollout has one node of its own
    assert (placement.actor_devices, placement.rollout_devices) == ([0], [1])


@pytest.mark.parametrize(("threshold", "steps", "staleness"), [("1", "4", 7), ("0.5", "2", 2), ("0", "1", 0)])
def test_the_fully_asynchronous_mode(threshold, steps, staleness):
    section = "trainer.v1.fully_async."
    line = f"trainer.v1.trainer_mode=fully_async {section}staleness_threshold={threshold} data.gen_batch_size=1"
    config = load(f"{line} {section}parameter_sync_step={steps} {DEVICES}")
    assert config.trainer.max_staleness == staleness and config.data.gen_batch_size is None
