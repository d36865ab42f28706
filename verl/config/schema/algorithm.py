"""The `algorithm` section: from scores to advantages."""

from typing import Any, Literal

from verl.config.fields import Section, StrList, field, is_positive, section

KLEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip

_ADAPTIVE = ("type", "adaptive")


class KLControlConfig(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = field("fixed", "fixed coefficient, or adapted towards target_kl")
    kl_coef: float = field(0.001, "coefficient (adaptive: initial value)", ge=0)
    horizon: int = field(
        10000, "adaptive: number of sequences over which the coefficient adapts", active_when=_ADAPTIVE, gt=0
    )
    target_kl: float = field(0.1, "adaptive: target KL", active_when=_ADAPTIVE, gt=0)


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`: dynamic sampling (DAPO) drops zero-variance groups and samples new ones."""

    enable: bool = field(False, "drop zero-variance groups and sample others")
    metric: str = field(
        "reward",
        "what is compared in a group: reward (or score, seq_reward, seq_final_reward), or a value that the reward "
        "function returns",
    )
    max_num_gen_batches: int = field(0, "maximum number of generations per step; 0: no limit", ge=0)
    max_empty_gen_batches: int = field(
        20,
        "without that limit, stop the run after so many generations in a row in which no group is kept; 0: never",
        active_when=("max_num_gen_batches", 0),
        ge=0,
    )
    at_limit: Literal["error", "fill"] = field(
        "error",
        "at that limit: stop the run, or fill the batch with zero-variance groups (no gradient)",
        active_when=("max_num_gen_batches", is_positive),
    )


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction`: importance weights and masks for the training-inference mismatch."""

    rollout_is: Literal["token", "sequence"] | None = field(
        None, "importance weights per token or per sequence; null: none"
    )
    rollout_is_threshold: float | str = field(2.0, "upper bound of the weights, or 'low_high' to zero those outside")
    rollout_rs: str | None = field(None, "rejection sampling: comma-separated modes such as token_k1,seq_mean_k3")
    rollout_rs_threshold: float | str | None = field(None, "bounds of rollout_rs: one, or one per mode")
    rollout_is_batch_normalize: bool = field(False, "normalize the weights of a batch to mean 1")
    bypass_mode: bool = field(False, "use the rollout log-probs as old log-probs")
    loss_type: Literal["ppo_clip", "reinforce"] = field(
        "ppo_clip", "loss in bypass mode", active_when=("bypass_mode", True)
    )


class AlgorithmConfig(Section):
    """`algorithm`: from scores to advantages."""

    name: str | None = field(None, "preset: sets the fields of a published algorithm")
    adv_estimator: str = field("gae", "registered name of the advantage estimator")
    gamma: float = field(1.0, "discount factor per token", ge=0, le=1)
    lam: float = field(1.0, "lambda of GAE", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = field(True, "divide by the standard deviation of the group (Dr.GRPO: false)")
    use_kl_in_reward: bool = field(False, "subtract the KL to the reference from the reward")
    kl_penalty: KLEstimator = field("kl", "estimator of that KL", active_when=("use_kl_in_reward", True))
    kl_ctrl: KLControlConfig = section(
        KLControlConfig, "coefficient of that KL", active_when=("use_kl_in_reward", True)
    )
    filter_groups: FilterGroupsConfig = section(
        FilterGroupsConfig, "dynamic sampling", active_when=("filter_groups.enable", True)
    )
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig, "training-inference mismatch")
    passk_k: int | None = field(None, "k of the pass@k estimators; null: the published value", ge=1)
    passk_threshold: float | None = field(None, "analytic_passk: a higher score is a correct response; null: 0.5")
    f_norm: float | None = field(None, "gpg: divisor of the advantage; null: 1", gt=0)
    gdpo_reward_keys: StrList | None = field(None, "gdpo: reward components, as named by the reward function")
    gdpo_reward_weights: list[float] | None = field(None, "gdpo: their weights; null: 1 each")
    reward_dpo_coef: float | None = field(None, "prime: weight of the process rewards; null: 5", ge=0)
    reward_gt_coef: float | None = field(None, "prime: weight of the outcome reward; null: 5", ge=0)
    sppo_beta: float | None = field(None, "sppo: sharpness of the softmean over a prompt's rewards; null: 1", gt=0)
    shuffle_rewards: bool = field(False, "negative control: permute the rewards of the batch")
    adv_kwargs: dict[str, Any] = field({}, "further settings of a custom estimator: its keyword-only parameters")

    operator_kwargs: dict[str, dict[str, Any]] = field(
        {}, "settings of the operators of the flow, by operator: keyword-only parameters of their functions"
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the estimator gets."""
        return {**self.model_dump(), **self.adv_kwargs}
