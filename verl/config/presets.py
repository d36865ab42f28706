"""Presets: the settings of each algorithm, by config key.

`PRESETS[name]` is what `algorithm.name=<name>` sets; keys that the user sets take precedence. docs/algorithms.md cites
the papers and names differences from them.

A preset lists every setting that matters to the algorithm, defaults included, so that it reads as a definition.
"""

#: algorithms that are not presets -> their command
OTHER_COMMANDS = {
    "dpo": "verl dpo --online",
    "sppo": "python -m verl.trainer.main_ppo --config verl/recipe/sppo/sppo.yaml",
    "sft": "python -m verl.trainer.sft_trainer",
}

_ACTOR = "actor_rollout_ref.actor."
_N = "actor_rollout_ref.rollout.n"

_TOKEN_MEAN = {_ACTOR + "loss_agg_mode": "token-mean", _ACTOR + "entropy_coeff": 0.0}
_PPO_CLIP = {
    _ACTOR + "policy_loss.loss_mode": "vanilla",
    _ACTOR + "clip_ratio_low": 0.2,
    _ACTOR + "clip_ratio_high": 0.2,
    _ACTOR + "clip_ratio_c": 3.0,
    **_TOKEN_MEAN,
}
_NO_KL = {"algorithm.use_kl_in_reward": False, _ACTOR + "use_kl_loss": False}
_KL_IN_REWARD = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    _ACTOR + "use_kl_loss": False,
}
_KL_IN_LOSS = {
    "algorithm.use_kl_in_reward": False,
    _ACTOR + "use_kl_loss": True,
    _ACTOR + "kl_loss_coef": 0.001,
    _ACTOR + "kl_loss_type": "low_var_kl",
}
_GRPO_ADVANTAGE = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": True, _N: 8}
# GRPO without KL: the baseline on which papers compare policy losses
_PLAIN_GRPO = {**_GRPO_ADVANTAGE, **_PPO_CLIP, **_NO_KL}
_UNCLIPPED_GRPO = {**_GRPO_ADVANTAGE, **_TOKEN_MEAN, **_NO_KL}


def _actor(**settings: object) -> dict[str, object]:
    """Keys of the actor; a double underscore is a dot."""
    return {_ACTOR + key.replace("__", "."): value for key, value in settings.items()}


PRESETS: dict[str, dict[str, object]] = {
    # advantage estimators
    "ppo": {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "critic.cliprange_value": 0.5,
    }
    | _PPO_CLIP
    | _KL_IN_REWARD,
    "grpo": _GRPO_ADVANTAGE | _PPO_CLIP | _KL_IN_LOSS,
    "drgrpo": _PLAIN_GRPO
    | {"algorithm.norm_adv_by_std_in_grpo": False}
    | _actor(loss_agg_mode="seq-mean-token-sum-norm"),
    "grpo_passk": _PLAIN_GRPO | {"algorithm.adv_estimator": "grpo_passk"},
    "analytic_passk": _PLAIN_GRPO | {"algorithm.adv_estimator": "analytic_passk"},
    "rloo": {"algorithm.adv_estimator": "rloo", _N: 8} | _PPO_CLIP | _KL_IN_REWARD,
    "remax": {"algorithm.adv_estimator": "remax", _N: 1} | _PPO_CLIP | _KL_IN_REWARD,
    "reinforce_plus_plus": {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 1.0, _N: 1}
    | _PPO_CLIP
    | _KL_IN_REWARD,
    "reinforce_plus_plus_baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline", _N: 8}
    | _PPO_CLIP
    | _KL_IN_LOSS
    | _actor(kl_loss_type="k2"),
    "opo": _PLAIN_GRPO | {"algorithm.adv_estimator": "opo"},
    "gdpo": _PLAIN_GRPO | {"algorithm.adv_estimator": "gdpo"},
    "optimal_token_baseline": _PLAIN_GRPO
    | {"algorithm.adv_estimator": "optimal_token_baseline"}
    | _actor(calculate_sum_pi_squared=True),
    "tir_optimal_token_baseline": _PLAIN_GRPO
    | {"algorithm.adv_estimator": "tir_optimal_token_baseline"}
    | _actor(calculate_sum_pi_squared=True),
    "prime": _PLAIN_GRPO | {"algorithm.adv_estimator": "prime", _N: 4},
    # policy losses
    "gpg": {"algorithm.adv_estimator": "gpg", _N: 8} | _TOKEN_MEAN | _NO_KL | _actor(policy_loss__loss_mode="gpg"),
    "gspo": _PLAIN_GRPO
    | _actor(
        policy_loss__loss_mode="gspo",
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        loss_agg_mode="seq-mean-token-mean",
    ),
    "gmpo": _PLAIN_GRPO
    | _actor(
        policy_loss__loss_mode="geo_mean",
        clip_ratio_low=0.4,
        clip_ratio_high=0.4,
        loss_agg_mode="seq-mean-token-mean",
    ),
    "cispo": _PLAIN_GRPO | _actor(policy_loss__loss_mode="cispo", clip_ratio_low=10.0, clip_ratio_high=0.2),
    "sapo": _UNCLIPPED_GRPO
    | _actor(policy_loss__loss_mode="sapo", tau_pos=1.0, tau_neg=1.05, loss_agg_mode="seq-mean-token-mean"),
    "dapo": _PLAIN_GRPO
    | {
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": 10,
        _N: 16,
    }
    | _actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0),
    "clip_cov": _PLAIN_GRPO
    | _actor(
        policy_loss__loss_mode="clip_cov",
        policy_loss__clip_cov_ratio=2e-4,
        policy_loss__clip_cov_lb=1.0,
        policy_loss__clip_cov_ub=5.0,
    ),
    "kl_cov": _UNCLIPPED_GRPO
    | _actor(policy_loss__loss_mode="kl_cov", policy_loss__kl_cov_ratio=2e-4, policy_loss__ppo_kl_coef=1.0),
    "dppo_tv": _PLAIN_GRPO
    | _actor(policy_loss__loss_mode="dppo_tv", clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=20.0),
    "dppo_kl": _PLAIN_GRPO
    | _actor(policy_loss__loss_mode="dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=20.0),
    "decoupled_ppo": _PLAIN_GRPO
    | {"algorithm.rollout_correction.bypass_mode": False, "algorithm.rollout_correction.rollout_is_threshold": 2.0}
    | _actor(policy_loss__loss_mode="decoupled_ppo"),
}
