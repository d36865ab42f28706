"""The functions of upstream verl's `core_algos`, with its argument order. Each calls a function of this package.

Nothing is computed here. Advantage functions return (advantages, returns), both zero outside the response mask.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from verl.algorithms import advantages as _advantages
from verl.algorithms import kl as _kl
from verl.algorithms import off_policy_losses as _off_policy_losses
from verl.algorithms import policy_losses as _policy_losses
from verl.algorithms import token_baselines as _token_baselines
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn, register_adv_est
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, kl_penalty
from verl.algorithms.kl import entropy_loss as compute_entropy_loss
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


def _upstream(fn: Callable, required: str, **defaults: Any) -> Callable:
    """Return `fn` with upstream's parameters, in upstream's order.

    `index` is passed as `uid`; parameters that `fn` does not have (`epsilon`, `config`) are accepted and ignored.

    Args:
        fn: a function of this package.
        required: names of the parameters without a default.
        defaults: the other parameters.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in required.split()]
    parameters += [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]
    signature = inspect.Signature(parameters)
    accepted = inspect.signature(fn).parameters

    def compute(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {"uid" if name == "index" else name: value for name, value in bound.arguments.items()}
        return fn(**{name: value for name, value in given.items() if name in accepted})

    compute.__signature__ = signature
    compute.__doc__ = f"`{fn.__module__.removeprefix('verl.algorithms.')}.{fn.__name__}` with upstream's arguments."
    return compute


_OUTCOME = "token_level_rewards response_mask index"
_TOKENS = f"{_OUTCOME} old_log_probs sum_pi_squared"
_TOKEN_DEFAULTS = {"rollout_is_weights": None, "handle_zero_tail": True, "epsilon": 1e-8, "config": None}

compute_gae_advantage_return = _upstream(_advantages.gae, "token_level_rewards values response_mask gamma lam")
compute_grpo_outcome_advantage = _upstream(
    _advantages.grpo, _OUTCOME, epsilon=1e-6, norm_adv_by_std_in_grpo=True, config=None
)
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_outcome_advantage = _upstream(_advantages.rloo, _OUTCOME, epsilon=1e-6, config=None)
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage
compute_opo_outcome_advantage = _upstream(_advantages.opo, _OUTCOME, epsilon=1e-6, config=None)
# `alpha` is always computed from the batch
compute_gpg_outcome_advantage = _upstream(_advantages.gpg, _OUTCOME, epsilon=1e-6, f_norm=1.0, alpha=1.0, config=None)
compute_reinforce_plus_plus_baseline_outcome_advantage = _upstream(
    _advantages.reinforce_plus_plus_baseline, _OUTCOME, epsilon=1e-6, config=None
)
compute_remax_outcome_advantage = _upstream(
    _advantages.remax, "token_level_rewards reward_baselines response_mask", config=None
)
compute_optimal_token_baseline_advantage = _upstream(
    _token_baselines.optimal_token_baseline, _TOKENS, **_TOKEN_DEFAULTS
)
compute_multi_turn_optimal_token_baseline_advantage = _upstream(
    _token_baselines.tir_optimal_token_baseline, _TOKENS, **_TOKEN_DEFAULTS
)
compute_policy_loss_reinforce = _upstream(
    _off_policy_losses.reinforce,
    "old_log_prob log_prob advantages response_mask",
    loss_agg_mode="seq-mean-token-sum",
    config=None,
    rollout_is_weights=None,
)


def compute_grpo_passk_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True, config=None
):
    """`advantages.grpo_passk`; `config.norm_adv_by_std_in_grpo` takes precedence."""
    divide = norm_adv_by_std_in_grpo if config is None else config.get("norm_adv_by_std_in_grpo", True)
    return _advantages.grpo_passk(
        token_level_rewards, response_mask, index, epsilon=epsilon, norm_adv_by_std_in_grpo=divide
    )


def compute_reinforce_plus_plus_outcome_advantage(token_level_rewards, response_mask, config=None):
    """`advantages.reinforce_plus_plus`, with `config.gamma`."""
    gamma = 1.0 if config is None else config.gamma
    return _advantages.reinforce_plus_plus(token_level_rewards, response_mask, gamma=gamma)


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
    """`policy_losses.vanilla`: (loss, clip fraction, KL to the old policy, lower clip fraction)."""
    clip = {"clip_ratio": cliprange, "clip_ratio_low": cliprange_low, "clip_ratio_high": cliprange_high}
    loss, metrics = _policy_losses.vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, **clip, clip_ratio_c=clip_ratio_c
    )
    means = merge_metrics([metrics])
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return loss, *(torch.tensor(means[name]) for name in names)


def compute_value_loss(vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode="token-mean"):
    """`kl.value_loss`: (loss, clip fraction)."""
    loss, metrics = _kl.value_loss(
        vpreds, returns, values, response_mask, loss_agg_mode, cliprange_value=cliprange_value
    )
    return loss, torch.tensor(merge_metrics([metrics])["critic/vf_clipfrac"])


def compute_rewards(token_level_scores, old_log_prob, ref_log_prob, kl_ratio):
    """`kl.apply_kl_penalty` with the k1 estimate, at every position."""
    ones = torch.ones_like(token_level_scores)
    rewards, _ = _kl.apply_kl_penalty(
        token_level_scores, old_log_prob, ref_log_prob, ones, kl_coef=kl_ratio, kl_penalty_kind="k1"
    )
    return rewards


def get_kl_controller(kl_ctrl):
    """`kl.get_kl_controller` from an object with type, kl_coef and, if adaptive, target_kl and horizon."""
    if kl_ctrl.type != "adaptive":
        return _kl.get_kl_controller(kl_ctrl.type, kl_ctrl.kl_coef)
    return _kl.get_kl_controller(kl_ctrl.type, kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
