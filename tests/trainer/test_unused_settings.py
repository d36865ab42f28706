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
    return load_config(overrides=overrides)


def keys(*overrides: str) -> set[str]:
    """The keys that are said to change nothing."""
    config = load(*overrides)
    return {note.partition(":")[0] for note in [*unused_settings(config), *settings_without_effect(config)]}


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_algorithm_uses_all_of_its_settings(name):
    further = {"gdpo": ["algorithm.gdpo_reward_keys=[acc]"], "drgrpo": [f"{ACTOR}loss_scale_factor=512"]}
    assert keys(f"algorithm.name={name}", *further.get(name, [])) == set()


CORRECTION, ROLLOUT = "algorithm.rollout_correction.", "actor_rollout_ref.rollout."
OF_GRPO = ["algorithm.lam=0.95", "algorithm.gamma=0.9", "algorithm.sppo_beta=2", "critic.optim.lr=1e-4"]
OF_GRPO += ["algorithm.kl_penalty=k2", "algorithm.filter_groups.metric=acc", "trainer.max_critic_ckpt_to_keep=2"]
OF_GRPO += [f"{ACTOR}{setting}" for setting in ("loss_scale_factor=512", "tau_pos=2", "policy_loss.dro_beta=2")]
OF_GRPO += [f"{CORRECTION}{name}_threshold=5" for name in ("rollout_is", "rollout_rs")]
#: settings of which the last one has no effect
UNREAD = [f"algorithm.name=grpo {setting}" for setting in OF_GRPO]
UNREAD += ["algorithm.name=rloo algorithm.norm_adv_by_std_in_grpo=false", f"algorithm.name=gpg {ACTOR}clip_ratio=0.3"]
UNREAD += [f"algorithm.name=dapo {ACTOR}{setting}" for setting in ("kl_loss_type=k2", "kl_loss_coef=0.1")]
UNREAD += ["algorithm.name=dapo actor_rollout_ref.ref.fsdp_config.param_offload=true"]
UNREAD += ["algorithm.name=ppo algorithm.kl_ctrl.target_kl=3", f"algorithm.name=gspo {ACTOR}clip_ratio_c=10"]
UNREAD += [f"algorithm.name=grpo {ACTOR}use_dynamic_bsz=true {ACTOR}ppo_micro_batch_size_per_gpu=2"]
UNREAD += [
    "reward.failure_score=-1",
    "reward.max_failure_rate=0.5",
]
UNREAD += [f"reward.reward_model.{setting}=true" for setting in ("use_dynamic_bsz", "fsdp.param_offload")]
UNREAD += ["trainer.early_stopping.min_delta=0.1", "trainer.save_best_mode=min"]
UNREAD += ["trainer.resume_mode=disable trainer.allow_change=[data]", f"{CORRECTION}loss_type=reinforce"]
UNREAD += ["actor_rollout_ref.model.lora_adapter_path=x actor_rollout_ref.model.exclude_modules=[lm_head]"]
UNREAD += ["actor_rollout_ref.model.target_modules=[q_proj]", "critic.model.lora_alpha=8", f"{ACTOR}data_loader_seed=1"]
UNREAD += [f"{ACTOR}optim.num_cycles=2", f"{ACTOR}optim.lr_warmup_steps=5 {ACTOR}optim.lr_warmup_steps_ratio=0.1"]
UNREAD += [f"{ACTOR}ppo_micro_batch_size_per_gpu=2 {ACTOR}ppo_max_token_len_per_gpu=99"]
UNREAD += [f"{ROLLOUT}log_prob_use_dynamic_bsz=true {ROLLOUT}log_prob_micro_batch_size_per_gpu=2"]


@pytest.mark.parametrize("line", UNREAD)
def test_a_setting_of_another_algorithm_is_named(line):
    overrides = line.split()
    assert overrides[-1].partition("=")[0] in keys(*overrides)


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
