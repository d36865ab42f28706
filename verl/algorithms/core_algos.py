"""The names that code written for verl's `core_algos` imports: each calls the function of this package.

Nothing is computed here. Advantage functions return (advantages, returns), both zero outside the response mask.
"""

import torch

from verl.algorithms import advantages as _advantages
from verl.algorithms import kl as _kl
from verl.algorithms import losses as _losses
from verl.algorithms import off_policy_losses as _off_policy_losses
from verl.algorithms import policy_losses as _policy_losses
from verl.algorithms import token_baselines as _token_baselines
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn, register_adv_est
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, kl_penalty
from verl.algorithms.masked import agg_loss, merge_metrics
from verl.algorithms.policy_losses import POLICY_LOSS_REGISTRY, get_policy_loss_fn, register_policy_loss

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "FixedKLController",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss",
    "compute_policy_loss_reinforce",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]


def compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, lam):
    """`advantages.gae`."""
    return _advantages.gae(token_level_rewards, response_mask, values, gamma=float(gamma), lam=float(lam))


def compute_grpo_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True, config=None
):
    """`advantages.grpo`."""
    return _advantages.grpo(
        token_level_rewards,
        response_mask,
        index,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
    )


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_grpo_passk_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True, config=None
):
    """`advantages.grpo_passk`; a `config` decides on the normalisation."""
    normalise = norm_adv_by_std_in_grpo if config is None else config.get("norm_adv_by_std_in_grpo", True)
    return _advantages.grpo_passk(
        token_level_rewards, response_mask, index, epsilon=epsilon, norm_adv_by_std_in_grpo=normalise
    )


def compute_rloo_outcome_advantage(token_level_rewards, response_mask, index, epsilon=1e-6, config=None):
    """`advantages.rloo`."""
    return _advantages.rloo(token_level_rewards, response_mask, index)


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


def compute_opo_outcome_advantage(token_level_rewards, response_mask, index, epsilon=1e-6, config=None):
    """`advantages.opo`."""
    return _advantages.opo(token_level_rewards, response_mask, index)


def compute_gpg_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, f_norm=1.0, alpha=1.0, config=None
):
    """`advantages.gpg`; `alpha` is always computed from the batch."""
    return _advantages.gpg(token_level_rewards, response_mask, index, epsilon=epsilon, f_norm=f_norm)


def compute_reinforce_plus_plus_outcome_advantage(token_level_rewards, response_mask, config=None):
    """`advantages.reinforce_plus_plus`, with `config.gamma`."""
    gamma = 1.0 if config is None else config.gamma
    return _advantages.reinforce_plus_plus(token_level_rewards, response_mask, gamma=gamma)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, config=None
):
    """`advantages.reinforce_plus_plus_baseline`."""
    return _advantages.reinforce_plus_plus_baseline(token_level_rewards, response_mask, index)


def compute_remax_outcome_advantage(token_level_rewards, reward_baselines, response_mask, config=None):
    """`advantages.remax`."""
    return _advantages.remax(token_level_rewards, response_mask, reward_baselines)


def compute_gdpo_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, config=None, non_tensor_batch=None, batch=None, **kwargs
):
    """`advantages.gdpo`, with `config.gdpo_reward_keys` and `config.gdpo_reward_weights`."""
    return _advantages.gdpo(
        token_level_rewards,
        response_mask,
        index,
        {**(non_tensor_batch or {}), **(batch or {})},
        gdpo_reward_keys=config.get("gdpo_reward_keys"),
        gdpo_reward_weights=config.get("gdpo_reward_weights"),
        epsilon=epsilon,
    )


def compute_optimal_token_baseline_advantage(
    token_level_rewards,
    response_mask,
    index,
    old_log_probs,
    sum_pi_squared,
    rollout_is_weights=None,
    handle_zero_tail=True,
    epsilon=1e-8,
    **kwargs,
):
    """`token_baselines.optimal_token_baseline`."""
    return _token_baselines.optimal_token_baseline(
        token_level_rewards,
        response_mask,
        index,
        old_log_probs,
        sum_pi_squared,
        rollout_is_weights,
        handle_zero_tail=handle_zero_tail,
        epsilon=epsilon,
    )


def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards,
    response_mask,
    index,
    old_log_probs,
    sum_pi_squared,
    rollout_is_weights=None,
    handle_zero_tail=True,
    epsilon=1e-8,
    **kwargs,
):
    """`token_baselines.tir_optimal_token_baseline`."""
    return _token_baselines.tir_optimal_token_baseline(
        token_level_rewards,
        response_mask,
        index,
        old_log_probs,
        sum_pi_squared,
        rollout_is_weights,
        handle_zero_tail=handle_zero_tail,
        epsilon=epsilon,
    )


def compute_policy_loss_reinforce(
    rollout_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="seq-mean-token-sum",
    config=None,
    rollout_is_weights=None,
):
    """`off_policy_losses.reinforce`."""
    return _off_policy_losses.reinforce(
        rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, rollout_is_weights=rollout_is_weights
    )


def compute_policy_loss(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    cliprange=0.2,
    cliprange_low=None,
    cliprange_high=None,
    clip_ratio_c=3.0,
    loss_agg_mode="token-mean",
):
    """`policy_losses.vanilla` -> (loss, clip fraction, KL to the old policy, lower clip fraction)."""
    loss, metrics = _policy_losses.vanilla(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        clip_ratio=cliprange,
        clip_ratio_low=cliprange_low,
        clip_ratio_high=cliprange_high,
        clip_ratio_c=clip_ratio_c,
    )
    means = merge_metrics([metrics])
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return loss, *(torch.tensor(means[name]) for name in names)


def compute_value_loss(vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode="token-mean"):
    """`losses.value_loss` -> (loss, clip fraction)."""
    loss, metrics = _losses.value_loss(
        vpreds, returns, values, response_mask, loss_agg_mode, cliprange_value=cliprange_value
    )
    return loss, torch.tensor(merge_metrics([metrics])["critic/vf_clipfrac"])


def compute_entropy_loss(logits, response_mask, loss_agg_mode="token-mean"):
    """`losses.entropy_loss`."""
    return _losses.entropy_loss(logits, response_mask, loss_agg_mode)


def compute_rewards(token_level_scores, old_log_prob, ref_log_prob, kl_ratio):
    """`kl.apply_kl_penalty` with the k1 estimate, on every position."""
    everywhere = torch.ones_like(token_level_scores)
    rewards, _ = _kl.apply_kl_penalty(
        token_level_scores, old_log_prob, ref_log_prob, everywhere, kl_coef=kl_ratio, kl_penalty_kind="k1"
    )
    return rewards


def get_kl_controller(kl_ctrl):
    """`kl.get_kl_controller` from an object with type, kl_coef and, if adaptive, target_kl and horizon."""
    if kl_ctrl.type != "adaptive":
        return _kl.get_kl_controller(kl_ctrl.type, kl_ctrl.kl_coef)
    return _kl.get_kl_controller(kl_ctrl.type, kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
