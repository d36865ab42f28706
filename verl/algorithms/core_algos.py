"""The functions of public verl's `core_algos`, with its argument order. Each calls a function of this package.

Advantage functions return (advantages, returns), both zero outside the response mask. Policy losses
(`compute_policy_loss_gspo`) return (loss, metrics) and read their settings from `config`, a mapping or an object in the
form of the section `actor_rollout_ref.actor`.

Training calls the functions behind these names. Only `compute_policy_loss` can be replaced by assignment, which changes
the loss `vanilla`; register a function to replace another.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import ModuleType
from typing import Any

import torch

from verl.algorithms import advantages as _advantages
from verl.algorithms import kl as _kl
from verl.algorithms import policy_losses as _policy_losses
from verl.algorithms import token_baselines as _token_baselines
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn, register_adv_est
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, kl_penalty
from verl.algorithms.kl import entropy_loss as compute_entropy_loss
from verl.algorithms.masked import LossAggregation, agg_loss
from verl.algorithms.policy_losses import (
    POLICY_LOSS_REGISTRY,
    PolicyLossFn,
    compute_policy_loss,
    get_policy_loss_fn,
    register_policy_loss,
)
from verl.registry import did_you_mean

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "PolicyLossFn",
    "agg_loss",
    "compute_entropy_loss",
    "compute_policy_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "kl_penalty_forward",
    "register_adv_est",
    "register_policy_loss",
]

_OUTCOME = "token_level_rewards response_mask index"
_NORMALIZED = f"{_OUTCOME} epsilon=1e-6 norm_adv_by_std_in_grpo=True config=None"
_TOKENS = (
    f"{_OUTCOME} old_log_probs sum_pi_squared rollout_is_weights=None handle_zero_tail=True epsilon=1e-8 config=None"
)
_LOSS = "old_log_prob log_prob advantages response_mask loss_agg_mode='seq-mean-token-sum' config=None "
_LOSS += "rollout_is_weights=None"

#: name in public verl -> the function of this package, and public verl's parameters in its order
_FUNCTIONS: dict[str, tuple[Callable, str]] = {
    "compute_gae_advantage_return": (_advantages.gae, "token_level_rewards values response_mask gamma lam"),
    "compute_grpo_outcome_advantage": (_advantages.grpo, _NORMALIZED),
    "compute_grpo_vectorized_outcome_advantage": (_advantages.grpo, _NORMALIZED),
    "compute_grpo_passk_outcome_advantage": (_advantages.grpo_passk, _NORMALIZED),
    "compute_rloo_outcome_advantage": (_advantages.rloo, f"{_OUTCOME} epsilon=1e-6 config=None"),
    "compute_rloo_vectorized_outcome_advantage": (_advantages.rloo, f"{_OUTCOME} epsilon=1e-6 config=None"),
    "compute_opo_outcome_advantage": (_advantages.opo, f"{_OUTCOME} epsilon=1e-6 config=None"),
    # `alpha` is always computed from the batch
    "compute_gpg_outcome_advantage": (_advantages.gpg, f"{_OUTCOME} epsilon=1e-6 f_norm=1.0 alpha=1.0 config=None"),
    "compute_reinforce_plus_plus_outcome_advantage": (
        _advantages.reinforce_plus_plus,
        "token_level_rewards response_mask config=None",
    ),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": (
        _advantages.reinforce_plus_plus_baseline,
        f"{_OUTCOME} epsilon=1e-6 config=None",
    ),
    "compute_remax_outcome_advantage": (
        _advantages.remax,
        "token_level_rewards reward_baselines response_mask config=None",
    ),
    "compute_optimal_token_baseline_advantage": (_token_baselines.optimal_token_baseline, _TOKENS),
    "compute_multi_turn_optimal_token_baseline_advantage": (_token_baselines.tir_optimal_token_baseline, _TOKENS),
    "compute_policy_loss_reinforce": (_policy_losses.reinforce, _LOSS),
}
#: settings that public verl's function reads from `config`, which takes precedence over a parameter
_FROM_CONFIG = {
    "compute_grpo_passk_outcome_advantage": "norm_adv_by_std_in_grpo",
    "compute_reinforce_plus_plus_outcome_advantage": "gamma",
}
#: policy losses `compute_policy_loss_<name>`
_LOSSES = (
    *("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo"),
    *("dro", "dppo_tv", "dppo_kl", "bypass_mode"),
)


class AdvantageEstimator(StrEnum):
    """The estimators of public verl. Every string that is registered is valid as well."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


def _with_public_signature(name: str, fn: Callable, parameters: str) -> Callable:
    """Return `fn` as the function `name` of public verl, with its parameters ("a b=1").

    `index` is passed as `uid`; parameters that `fn` does not have (`epsilon`, `config`) are accepted and ignored.
    """
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    pairs = [parameter.partition("=") for parameter in parameters.split()]
    defaults = {key: ast.literal_eval(value) if value else empty for key, _, value in pairs}
    signature = inspect.Signature([inspect.Parameter(key, kind, default=value) for key, value in defaults.items()])
    accepted = inspect.signature(fn).parameters
    setting = _FROM_CONFIG.get(name)

    def compute(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {"uid" if key == "index" else key: value for key, value in bound.arguments.items()}
        if setting is not None and arguments["config"] is not None:
            value = _setting(arguments["config"], setting)
            arguments[setting] = accepted[setting].default if value is None else value
        return fn(**{key: value for key, value in arguments.items() if key in accepted})

    compute.__name__ = compute.__qualname__ = name
    compute.__signature__ = signature
    compute.__doc__ = f"`{fn.__module__.removeprefix('verl.algorithms.')}.{fn.__name__}` with public verl's arguments."
    return compute


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


def compute_value_loss(
    vpreds,
    returns,
    values,
    response_mask,
    cliprange_value,
    loss_agg_mode="token-mean",
    dp_size=1,
    batch_num_tokens=None,
    global_batch_size=None,
    loss_scale_factor=None,
):
    """`kl.value_loss`: (loss, clip fraction). The counts of the mini-batch are as for `agg_loss`."""
    counts = {
        "batch_num_tokens": batch_num_tokens,
        "global_batch_size": global_batch_size,
        "loss_scale_factor": loss_scale_factor,
    }
    agg = _aggregation(loss_agg_mode, response_mask, counts)
    loss, metrics = _kl.value_loss(vpreds, returns, values, response_mask, agg, cliprange_value=cliprange_value)
    return loss * dp_size, torch.tensor(_means(metrics)["critic/vf_clipfrac"])


def kl_penalty_forward(logprob, ref_logprob, kl_penalty):
    """`kl.kl_penalty` without a trailing `+`, which changes only the gradient."""
    return _kl.kl_penalty(logprob, ref_logprob, kl_penalty.removesuffix("+"))


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


@torch.no_grad()
def compute_pf_ppo_reweight_data(data, reweight_method="pow", weight_pow=2.0):
    """Draw as many samples as `data` has, with replacement, weighted by their score (PF-PPO, arXiv 2409.06957).

    Args:
        data: a batch with the column token_level_scores (B, T).
        reweight_method: "pow": weight abs(score) ** weight_pow; "max_min": 1 for samples with the highest or lowest
            score, else 0; "max_random": 1 for the highest score, else 0.4.
        weight_pow: the exponent of "pow".
    """
    scores = data.batch["token_level_scores"].sum(-1)
    best = scores == scores.max()
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = (best | (scores == scores.min())).to(scores.dtype)
    elif reweight_method == "max_random":
        weights = torch.where(best, 1.0, 0.4)
    else:
        methods = ("pow", "max_min", "max_random")
        raise ValueError(f"unknown reweight_method {reweight_method!r}: {did_you_mean(str(reweight_method), methods)}")
    drawn = torch.multinomial(weights.clamp(min=1e-8), len(scores), replacement=True)  # all weights may be 0
    return data.select_idxs(drawn)


# ---- policy losses --------------------------------------------------------------------------------------------------


def _setting(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _settings(config: Any, names: set[str]) -> dict[str, Any]:
    """The values of `names` in the config of an actor and its sections; those that are missing or None are omitted."""
    policy = _setting(config, "policy_loss")
    sections = [config, policy, *(_setting(section, "rollout_correction") for section in (policy, config))]
    candidates = {name: [_setting(section, name) for section in sections if section is not None] for name in names}
    settings = {name: next((v for v in values if v is not None), None) for name, values in candidates.items()}
    if "clip_ratio" not in names:  # a loss whose two bounds have no common default
        shared = dict.fromkeys(names & {"clip_ratio_low", "clip_ratio_high"}, _setting(config, "clip_ratio"))
        settings = {name: shared.get(name) if value is None else value for name, value in settings.items()}
    return {name: value for name, value in settings.items() if value is not None}


def _aggregation(mode: str, response_mask: torch.Tensor, counts: Mapping[str, Any]) -> str:
    """`mode` with the counts of the mini-batch, where set; the others are those of `response_mask`."""
    if isinstance(mode, LossAggregation) or all(value is None for value in counts.values()):
        return mode
    computed = LossAggregation.from_mask(mode, response_mask, counts.get("loss_scale_factor"))
    tokens, sequences = counts.get("batch_num_tokens"), counts.get("global_batch_size")
    return LossAggregation(
        mode,
        computed.num_tokens if tokens is None else tokens,
        computed.num_sequences if sequences is None else sequences,
        computed.scale_factor,
    )


def _means(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a loss as numbers: of a pair (sum, count) the mean, 0 without a count."""
    pairs = {name: value if isinstance(value, tuple) else (value, 1) for name, value in metrics.items()}
    return {name: float(total) / float(count) if count else 0.0 for name, (total, count) in pairs.items()}


def _policy_loss(name: str) -> Callable:
    """Return a policy loss with public verl's parameters."""
    fn = POLICY_LOSS_REGISTRY[name]
    parameters = inspect.signature(fn).parameters
    names = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY} - {"rollout_is_weights", "generator"}

    def compute(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode=parameters["loss_agg_mode"].default,
        config=None,
        rollout_is_weights=None,
    ):
        settings = {} if config is None else _settings(config, names)
        if rollout_is_weights is not None and "rollout_is_weights" in parameters:
            settings["rollout_is_weights"] = rollout_is_weights
        info = dict((None if config is None else _setting(config, "global_batch_info")) or {})
        dp_size = info.pop("dp_size", None) or 1
        agg = _aggregation(loss_agg_mode, response_mask, info)
        loss, metrics = fn(old_log_prob, log_prob, advantages, response_mask, agg, **settings)
        return loss * dp_size, _means(metrics)

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    compute.__doc__ = f"`{fn.__module__.removeprefix('verl.algorithms.')}.{fn.__name__}` with public verl's arguments."
    return compute


globals().update({name: _with_public_signature(name, *target) for name, target in _FUNCTIONS.items()})
globals().update({f"compute_policy_loss_{name}": _policy_loss(name) for name in _LOSSES})

__all__ += [name for name in globals() if name.startswith("compute_") and name not in __all__]


# ---- replacing a published function ---------------------------------------------------------------------------------


class _CoreAlgos(ModuleType):
    """Makes an assignment to a published name take effect in training, or fail."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "compute_policy_loss":
            _policy_losses.compute_policy_loss = value
        elif name in __all__:
            raise AttributeError(
                f"training does not call core_algos.{name}, so replacing it would have no effect: register a function "
                "with register_policy_loss or register_adv_est and select it in the config"
            )
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _CoreAlgos
