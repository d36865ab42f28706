"""A setting that the chosen algorithm does not read is said once, by its key; published settings are never said."""

import logging

import pytest

from tests.trainer.conftest import run_settings
from verl.algorithms.policy_losses import POLICY_LOSS_REGISTRY
from verl.config import load_config, settings_without_effect
from verl.config.presets import PRESETS
from verl.trainer.checks.config import unused_settings
from verl.trainer.local_trainer import LocalPPOTrainer

ACTOR = "actor_rollout_ref.actor."


def load(*overrides: str):
    return load_config(overrides=overrides, presets=PRESETS)


def keys(*overrides: str) -> set[str]:
    """The keys that are said to change nothing."""
    config = load(*overrides)
    return {note.partition(":")[0] for note in [*unused_settings(config), *settings_without_effect(config)]}


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_algorithm_uses_all_of_its_settings(name):
    further = {"gdpo": ["algorithm.gdpo_reward_keys=[acc]"], "drgrpo": [f"{ACTOR}loss_scale_factor=512"]}
    assert keys(f"algorithm.name={name}", *further.get(name, [])) == set()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.name=grpo", "algorithm.lam=0.95"], "algorithm.lam"),
        (["algorithm.name=grpo", "algorithm.gamma=0.9"], "algorithm.gamma"),
        (["algorithm.name=rloo", "algorithm.norm_adv_by_std_in_grpo=false"], "algorithm.norm_adv_by_std_in_grpo"),
        (["algorithm.name=grpo", "algorithm.sppo_beta=2"], "algorithm.sppo_beta"),
        (["algorithm.name=grpo", "critic.optim.lr=1e-4"], "critic.optim.lr"),
        (["algorithm.name=dapo", f"{ACTOR}kl_loss_type=k2"], f"{ACTOR}kl_loss_type"),
        (["algorithm.name=dapo", f"{ACTOR}kl_loss_coef=0.1"], f"{ACTOR}kl_loss_coef"),
        (["algorithm.name=dapo", "actor_rollout_ref.ref.fsdp_config.param_offload=true"],
         "actor_rollout_ref.ref.fsdp_config.param_offload"),
        (["algorithm.name=grpo", "algorithm.kl_penalty=k2"], "algorithm.kl_penalty"),
        (["algorithm.name=ppo", "algorithm.kl_ctrl.target_kl=3"], "algorithm.kl_ctrl.target_kl"),
        (["algorithm.name=grpo", "algorithm.filter_groups.metric=acc"], "algorithm.filter_groups.metric"),
        (["algorithm.name=grpo", f"{ACTOR}loss_scale_factor=512"], f"{ACTOR}loss_scale_factor"),
        (["algorithm.name=gspo", f"{ACTOR}clip_ratio_c=10"], f"{ACTOR}clip_ratio_c"),
        (["algorithm.name=gpg", f"{ACTOR}clip_ratio=0.3"], f"{ACTOR}clip_ratio"),
        (["algorithm.name=grpo", f"{ACTOR}tau_pos=2"], f"{ACTOR}tau_pos"),
        (["algorithm.name=grpo", f"{ACTOR}policy_loss.dro_beta=2"], f"{ACTOR}policy_loss.dro_beta"),
        (["algorithm.name=grpo", "algorithm.rollout_correction.rollout_is_threshold=5"],
         "algorithm.rollout_correction.rollout_is_threshold"),
        (["algorithm.name=grpo", "algorithm.rollout_correction.rollout_rs_threshold=5"],
         "algorithm.rollout_correction.rollout_rs_threshold"),
        (["algorithm.name=grpo", f"{ACTOR}use_dynamic_bsz=true", f"{ACTOR}ppo_micro_batch_size_per_gpu=2"],
         f"{ACTOR}ppo_micro_batch_size_per_gpu"),
        (["reward.failure_score=-1"], "reward.failure_score"),
        (["reward.max_failure_rate=0.5"], "reward.max_failure_rate"),
        (["reward.on_error=quarantine", "reward.failure_score=-1"], "reward.failure_score"),
        (["reward.reward_model.use_dynamic_bsz=true"], "reward.reward_model.use_dynamic_bsz"),
        (["reward.reward_model.fsdp.param_offload=true"], "reward.reward_model.fsdp.param_offload"),
        (["trainer.early_stopping.min_delta=0.1"], "trainer.early_stopping.min_delta"),
        (["trainer.save_best_mode=min"], "trainer.save_best_mode"),
        (["trainer.resume_mode=disable", "trainer.allow_change=[data]"], "trainer.allow_change"),
        (["trainer.max_critic_ckpt_to_keep=2", "algorithm.name=grpo"], "trainer.max_critic_ckpt_to_keep"),
        (["actor_rollout_ref.model.target_modules=[q_proj]"], "actor_rollout_ref.model.target_modules"),
        (["actor_rollout_ref.model.lora_adapter_path=x", "actor_rollout_ref.model.exclude_modules=[lm_head]"],
         "actor_rollout_ref.model.exclude_modules"),
        (["critic.model.lora_alpha=8"], "critic.model.lora_alpha"),
        (["algorithm.rollout_correction.loss_type=reinforce"], "algorithm.rollout_correction.loss_type"),
        ([f"{ACTOR}data_loader_seed=1"], f"{ACTOR}data_loader_seed"),
        ([f"{ACTOR}optim.num_cycles=2"], f"{ACTOR}optim.num_cycles"),
        ([f"{ACTOR}optim.lr_warmup_steps=5", f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"],
         f"{ACTOR}optim.lr_warmup_steps_ratio"),
        ([f"{ACTOR}ppo_micro_batch_size_per_gpu=2", f"{ACTOR}ppo_max_token_len_per_gpu=99"],
         f"{ACTOR}ppo_max_token_len_per_gpu"),
        (["actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
          "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2"],
         "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"),
    ],
)  # fmt: skip
def test_a_setting_of_another_algorithm_is_named(overrides, key):
    assert key in keys(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=ppo", "algorithm.lam=0.95", "critic.optim.lr=1e-4", "algorithm.kl_ctrl.kl_coef=0.1"],
        ["algorithm.name=reinforce_plus_plus", "algorithm.gamma=0.9"],
        ["algorithm.name=grpo", f"{ACTOR}kl_loss_type=k2", "actor_rollout_ref.ref.fsdp_config.param_offload=true"],
        ["algorithm.name=dppo_tv", f"{ACTOR}clip_ratio=0.3"],  # by way of low and high, which follow it
        ["algorithm.name=decoupled_ppo", "algorithm.rollout_correction.rollout_is_threshold=5"],
        ["algorithm.name=grpo", "algorithm.rollout_correction.rollout_is=token",
         "algorithm.rollout_correction.rollout_is_threshold=5"],
        ["algorithm.name=grpo", f"{ACTOR}ppo_mini_batch_size=64", f"{ACTOR}shuffle=true"],  # the critic's follow
        ["algorithm.name=grpo", "algorithm.lam=1.0"],  # its default
        ["reward.on_error=count", "reward.failure_score=-1", "reward.max_failure_rate=0.5"],
        ["reward.on_error=quarantine", "reward.max_failure_rate=0.5"],
        ["trainer.early_stopping.patience=2", "trainer.early_stopping.min_delta=0.1", "trainer.save_best_mode=min"],
        ["trainer.allow_change=[data]"],
        ["critic.optim.lr_scheduler_type=cosine", "critic.optim.num_cycles=2"],  # the actor's is constant
        [f"{ACTOR}use_dynamic_bsz=true", f"{ACTOR}ppo_max_token_len_per_gpu=99"],
        [f"{ACTOR}ppo_max_token_len_per_gpu=99"],
        [f"{ACTOR}shuffle=true", f"{ACTOR}data_loader_seed=1"],
        [f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"],
    ],
)  # fmt: skip
def test_a_setting_that_is_read_is_not(overrides):
    assert keys(*overrides) == set()


def test_it_is_said_once_when_the_trainer_is_made(tiny, tmp_path, caplog):
    settings = [*run_settings(tiny, tmp_path), "algorithm.adv_estimator=grpo", "algorithm.lam=0.95"]
    with caplog.at_level(logging.WARNING, "verl"):
        LocalPPOTrainer(overrides=settings)
    said = [record.getMessage() for record in caplog.records if "algorithm.lam" in record.getMessage()]
    assert said == ["algorithm.lam: 0.95 has no effect with algorithm.adv_estimator=grpo"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.name=kl_cov"], True),
        (["algorithm.name=clip_cov", f"{ACTOR}ppo_micro_batch_size_per_gpu=3"], True),
        (["algorithm.name=clip_cov", f"{ACTOR}ppo_micro_batch_size_per_gpu=4"], False),  # 2 prompts x 2 answers
        (["algorithm.name=clip_cov", f"{ACTOR}ppo_micro_batch_size_per_gpu=4", f"{ACTOR}use_dynamic_bsz=true"], True),
        (["algorithm.name=grpo"], False),
    ],
)
def test_a_choice_among_the_tokens_of_a_micro_batch_is_said(overrides, said, tiny, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "verl"):
        LocalPPOTrainer(overrides=[*run_settings(tiny, tmp_path), *overrides])
    assert ("set actor.ppo_micro_batch_size_per_gpu=4 and" in caplog.text) == said


def test_a_critic_that_is_not_there_is_not_waited_for(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.critic_warmup.*nothing would be trained"):
        LocalPPOTrainer(
            overrides=[*run_settings(tiny, tmp_path), "algorithm.adv_estimator=grpo", "trainer.critic_warmup=2"]
        )


def test_a_loss_with_an_invalid_signature_fails_only_if_it_is_selected(settings):
    POLICY_LOSS_REGISTRY.register("by_position", lambda log_prob, loss_agg_mode, /: None)
    assert keys("algorithm.name=grpo", "algorithm.lam=0.95") == {"algorithm.lam"}
    with pytest.raises(ValueError, match="positional-only parameters"):
        LocalPPOTrainer(overrides=[*settings, f"{ACTOR}policy_loss.loss_mode=by_position"])
