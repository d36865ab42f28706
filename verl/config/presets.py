"""Presets: the settings of each algorithm, by config key.

`PRESETS[name]` is what `algorithm.name=<name>` sets; keys that the user sets take precedence. `PRESET_NOTES[name]`
cites the paper and says in a line what differs from it, or from plain PPO or GRPO.

A preset lists every setting that matters to the algorithm, defaults included, so that it reads as a definition.
"""

PRESETS: dict[str, dict[str, object]] = {}
PRESET_NOTES: dict[str, str] = {}

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


def _preset(name: str, note: str, *settings: dict[str, object]) -> None:
    PRESETS[name] = {key: value for group in settings for key, value in group.items()}
    PRESET_NOTES[name] = note


def _actor(**settings: object) -> dict[str, object]:
    """Keys of the actor; a double underscore is a dot."""
    return {_ACTOR + key.replace("__", "."): value for key, value in settings.items()}


# ------------------------------------------------------------------------------------------------ advantage estimators
_preset(
    "ppo",
    "Schulman et al. 2017 (1707.06347): a critic with GAE, clipped ratio, dual clip; KL in the reward.",
    {"algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0, "critic.cliprange_value": 0.5},
    _PPO_CLIP,
    _KL_IN_REWARD,
)
_preset(
    "grpo",
    "Shao et al. 2024 (2402.03300): group mean and std instead of a critic, KL in the loss. Token-mean instead of "
    "the paper's mean per sequence; KL coefficient 0.001 instead of 0.04.",
    _GRPO_ADVANTAGE,
    _PPO_CLIP,
    _KL_IN_LOSS,
)
_preset(
    "drgrpo",
    "Liu et al. 2025 (2503.20783): GRPO without the division by std and by length, which favor hard prompts and "
    "long incorrect responses; no KL. Set actor.loss_scale_factor to a constant, such as data.max_response_length.",
    _PLAIN_GRPO,
    {"algorithm.norm_adv_by_std_in_grpo": False},
    _actor(loss_agg_mode="seq-mean-token-sum-norm"),
)
_preset(
    "grpo_passk",
    "Tang et al. 2025 (2503.19595): optimizes the best of k: only the best response of a prompt has an advantage.",
    _PLAIN_GRPO,
    {"algorithm.adv_estimator": "grpo_passk"},
)
_preset(
    "analytic_passk",
    "Chen et al. 2025 (2508.10751): pass@k as the objective, in closed form over all subsets of k of the n responses.",
    _PLAIN_GRPO,
    {"algorithm.adv_estimator": "analytic_passk"},
)
_preset(
    "rloo",
    "Ahmadian et al. 2024 (2402.14740): the mean of the other responses as an unbiased baseline; KL in the reward. "
    "With PPO's clipping, which the paper omits.",
    {"algorithm.adv_estimator": "rloo", _N: 8},
    _PPO_CLIP,
    _KL_IN_REWARD,
)
_preset(
    "remax",
    "Li et al. 2023 (2310.10505): the reward of the greedy response as the baseline; KL in the reward.",
    {"algorithm.adv_estimator": "remax", _N: 1},
    _PPO_CLIP,
    _KL_IN_REWARD,
)
_preset(
    "reinforce_plus_plus",
    "Hu 2025 (2501.03262): rewards to go, whitened over the batch, one response per prompt; KL in the reward.",
    {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 1.0, _N: 1},
    _PPO_CLIP,
    _KL_IN_REWARD,
)
_preset(
    "reinforce_plus_plus_baseline",
    "Hu 2025 (2501.03262): the group mean as the baseline, whitened over the batch; KL in the loss, with k2.",
    {"algorithm.adv_estimator": "reinforce_plus_plus_baseline", _N: 8},
    _PPO_CLIP,
    _KL_IN_LOSS,
    _actor(kl_loss_type="k2"),
)
_preset(
    "opo",
    "Hao et al. 2025 (2505.23585): a baseline weighted by length; no KL, no entropy. Strictly on-policy: one update "
    "per batch (ppo_mini_batch_size = train_batch_size).",
    _PLAIN_GRPO,
    {"algorithm.adv_estimator": "opo"},
)
_preset(
    "gdpo",
    "2601.05242: several rewards (algorithm.gdpo_reward_keys), each standardized within its group, then summed.",
    _PLAIN_GRPO,
    {"algorithm.adv_estimator": "gdpo"},
)
_preset(
    "optimal_token_baseline",
    "A variance-optimal baseline per token, from the accumulated gradient energy; no KL.",
    _PLAIN_GRPO,
    {"algorithm.adv_estimator": "optimal_token_baseline"},
    _actor(calculate_sum_pi_squared=True),
)
_preset(
    "tir_optimal_token_baseline",
    "The optimal token baseline for responses with tool output: steps count only the tokens of the policy.",
    _PLAIN_GRPO,
    {"algorithm.adv_estimator": "tir_optimal_token_baseline"},
    _actor(calculate_sum_pi_squared=True),
)
_preset(
    "prime",
    "Cui et al. 2025 (2502.01456): process rewards of an implicit reward model and outcome rewards, each with a "
    "leave-one-out baseline. The reward model and prompt filtering are in verl/recipe/prime.",
    _PLAIN_GRPO,
    {"algorithm.adv_estimator": "prime", _N: 4},
)
# ------------------------------------------------------------------------------------------------------- policy losses
_preset(
    "gpg",
    "Chu et al. 2025 (2504.02546): plain policy gradient without ratio, KL or std; the advantage is scaled up for "
    "zero-variance groups. One update per batch.",
    {"algorithm.adv_estimator": "gpg", _N: 8},
    _TOKEN_MEAN,
    _NO_KL,
    _actor(policy_loss__loss_mode="gpg"),
)
_preset(
    "gspo",
    "Zheng et al. 2025 (2507.18071): one ratio per response, normalized by its length, and clipped as a whole.",
    _PLAIN_GRPO,
    _actor(
        policy_loss__loss_mode="gspo",
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        loss_agg_mode="seq-mean-token-mean",
    ),
)
_preset(
    "gmpo",
    "Zhao et al. 2025 (2507.20673): the geometric mean of the token ratios, each clipped in log space to +-0.4.",
    _PLAIN_GRPO,
    _actor(
        policy_loss__loss_mode="geo_mean",
        clip_ratio_low=0.4,
        clip_ratio_high=0.4,
        loss_agg_mode="seq-mean-token-mean",
    ),
)
_preset(
    "cispo",
    "MiniMax 2025 (2506.13585): the clipped ratio is a constant weight, so every token keeps its gradient; no "
    "lower bound (clip_ratio_low=10 disables it).",
    _PLAIN_GRPO,
    _actor(policy_loss__loss_mode="cispo", clip_ratio_low=10.0, clip_ratio_high=0.2),
)
_preset(
    "sapo",
    "Gao et al. 2025 (2511.20347): a sigmoid gate instead of the clip, narrower for negative advantages.",
    _UNCLIPPED_GRPO,
    _actor(policy_loss__loss_mode="sapo", tau_pos=1.0, tau_neg=1.05, loss_agg_mode="seq-mean-token-mean"),
)
_preset(
    "dapo",
    "Yu et al. 2025 (2503.14476): clip-higher, token-mean, dynamic sampling; no KL. The soft overlong penalty is in "
    "verl/recipe/dapo.",
    _PLAIN_GRPO,
    {
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": 10,
        _N: 16,
    },
    _actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0),
)
_preset(
    "clip_cov",
    "Cui et al. 2025 (2505.22617): preserves entropy by dropping a few random tokens of high covariance between "
    "log-prob and advantage.",
    _PLAIN_GRPO,
    _actor(
        policy_loss__loss_mode="clip_cov",
        policy_loss__clip_cov_ratio=2e-4,
        policy_loss__clip_cov_lb=1.0,
        policy_loss__clip_cov_ub=5.0,
    ),
)
_preset(
    "kl_cov",
    "Cui et al. 2025 (2505.22617): preserves entropy by a KL penalty on the tokens of highest covariance; no clip.",
    _UNCLIPPED_GRPO,
    _actor(policy_loss__loss_mode="kl_cov", policy_loss__kl_cov_ratio=2e-4, policy_loss__ppo_kl_coef=1.0),
)
_preset(
    "dppo_tv",
    "2602.04879: drops tokens whose probability has moved too far (total variation) in the direction of the advantage.",
    _PLAIN_GRPO,
    _actor(policy_loss__loss_mode="dppo_tv", clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=20.0),
)
_preset(
    "dppo_kl",
    "2602.04879: dppo_tv with a bound on the KL between the old and the new probability of the token.",
    _PLAIN_GRPO,
    _actor(policy_loss__loss_mode="dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=20.0),
)
_preset(
    "decoupled_ppo",
    "Fu et al. 2025 (2505.24298): for stale data: clipped around the policy before the update, with importance weights "
    "for the policy that sampled.",
    _PLAIN_GRPO,
    {"algorithm.rollout_correction.bypass_mode": False, "algorithm.rollout_correction.rollout_is_threshold": 2.0},
    _actor(policy_loss__loss_mode="decoupled_ppo"),
)
