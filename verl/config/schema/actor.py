"""The `actor`, `ref` and `critic` sections."""

from typing import Any, Literal

from verl.config.fields import Section, field, like, never, section
from verl.config.schema.algorithm import KLEstimator
from verl.config.schema.megatron import MegatronConfig, RefMegatronConfig
from verl.config.schema.model import (
    MODEL_PARALLEL,
    SHARDED,
    ActorCheckpointConfig,
    CriticCheckpointConfig,
    CriticModelConfig,
    CriticOptimConfig,
    EngineConfig,
    OptimConfig,
    is_model_parallel,
)
from verl.config.schema.rollout import RolloutConfig

LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]

_ACTOR = "${actor_rollout_ref.actor."
_NORM = ("loss_agg_mode", "seq-mean-token-sum-norm")
#: fields of a `megatron` section that only a trained model has
_OF_TRAINING = (
    *("use_distributed_optimizer", "grad_offload", "optimizer_offload"),
    *("override_transformer_config.moe_aux_loss_coeff", "override_transformer_config.moe_z_loss_coeff"),
)


class PolicyLossConfig(Section):
    """`actor_rollout_ref.actor.policy_loss`: the policy loss, and the numbers that only some losses use."""

    loss_mode: str = field("vanilla", "registered name of the policy loss")
    clip_cov_ratio: float = field(2e-4, "clip_cov: fraction of the tokens whose gradient is dropped", ge=0, le=1)
    clip_cov_lb: float = field(1.0, "clip_cov: lower bound of the covariance of these tokens")
    clip_cov_ub: float = field(5.0, "clip_cov: upper bound of the covariance of these tokens")
    kl_cov_ratio: float = field(2e-4, "kl_cov: fraction of the tokens that are penalized", ge=0, le=1)
    ppo_kl_coef: float | None = field(None, "kl_cov: coefficient of the penalty; null: the published value", ge=0)
    sppo_eta: float | None = field(None, "sppo: target log-ratio per unit of advantage; null: 1", gt=0)
    dro_beta: float | None = field(None, "dro: coefficient of the quadratic term (required by this loss)", gt=0)
    loss_kwargs: dict[str, Any] = field({}, "further settings of a custom loss: its keyword-only parameters")


class RouterReplayConfig(Section):
    """`actor_rollout_ref.actor.router_replay`: repeat recorded choices of the routers of a mixture of experts."""

    mode: Literal["disabled", "R2", "R3"] = field(
        "disabled",
        "R3: replay the choices of the rollout in old log-probs and updates "
        "(needs rollout.enable_rollout_routing_replay); R2: replay those of the old log-probs in the updates",
    )


class _RoleSection(Section):
    """The section of a role: a model with its training engine."""

    @property
    def engine(self) -> EngineConfig | MegatronConfig:
        """The section of the selected engine."""
        return self.megatron if is_model_parallel(self.strategy) else self["fsdp" if "fsdp" in self else "fsdp_config"]


class ActorConfig(_RoleSection):
    """`actor_rollout_ref.actor`: the policy update."""

    strategy: str = field("fsdp", "registered name of the training engine: fsdp, fsdp2, megatron, or a custom one")
    ppo_mini_batch_size: int = field(
        256, "PROMPTS per optimizer update over all ranks (times rollout.n = responses); at most the batch", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = field(
        None,
        "SEQUENCES per forward and backward pass of one rank; null: by ppo_max_token_len_per_gpu",
        active_when=("use_dynamic_bsz", False),
        ge=1,
    )
    use_dynamic_bsz: bool = field(False, "size micro-batches by tokens instead of sequences")
    ppo_max_token_len_per_gpu: int | None = field(
        None,
        "tokens per micro-batch of one rank, if no size is set or with use_dynamic_bsz; null: 16384, or what fits into "
        "the free memory of the GPU",
        active_when=(("ppo_micro_batch_size_per_gpu", None), ("use_dynamic_bsz", True)),
        ge=1,
    )
    ppo_epochs: int = field(1, "optimization epochs per batch", ge=1)
    old_log_prob_pass: Literal["auto", "always"] = field(
        "auto", "compute old log-probs in a separate forward pass; auto: not if a step has a single update"
    )
    shuffle: bool = field(False, "shuffle the mini-batches")
    data_loader_seed: int = field(
        42, "seed of that shuffle", default_from="${trainer.seed}", active_when=("shuffle", True), ge=0, le=2**62
    )
    clip_ratio: float | None = field(
        None, "clip range of the probability ratio; null: the published value of the loss (PPO: 0.2)", ge=0
    )
    clip_ratio_low: float | None = field(
        None, "lower clip range: the ratio is clipped at 1 - this", default_from=_ACTOR + "clip_ratio}", ge=0
    )
    clip_ratio_high: float | None = field(
        None, "upper clip range: the ratio is clipped at 1 + this", default_from=_ACTOR + "clip_ratio}", ge=0
    )
    clip_ratio_c: float = field(3.0, "dual clip: bound of the loss for negative advantages", gt=1)
    tau_pos: float = field(1.0, "sapo: temperature for positive advantages", gt=0)
    tau_neg: float = field(1.05, "sapo: temperature for other advantages", gt=0)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "the policy loss")
    loss_agg_mode: LossAggregation | None = field(
        None, "how token losses are aggregated; null: the published mode of the policy loss (most: token-mean)"
    )
    loss_scale_factor: float | None = field(
        None, "divisor of seq-mean-token-sum-norm; null: the maximum response length", active_when=_NORM, gt=0
    )
    entropy_coeff: float = field(0.0, "coefficient of the entropy bonus")
    calculate_sum_pi_squared: bool = field(
        False, "compute the sum of squared probabilities over the vocabulary, for optimal_token_baseline"
    )
    use_kl_loss: bool = field(False, "add the KL to the reference to the loss")
    kl_loss_coef: float = field(0.001, "coefficient of that KL", active_when=("use_kl_loss", True), ge=0)
    kl_loss_type: KLEstimator = field(
        "low_var_kl", "estimator of that KL; '+': its value with the gradient of k2", active_when=("use_kl_loss", True)
    )
    optim: OptimConfig = section(OptimConfig, "optimizer")
    fsdp_config: EngineConfig = section(EngineConfig, "precision, sharding and offloading", active_when=SHARDED)
    megatron: MegatronConfig = section(
        MegatronConfig, "precision and parallelism of strategy=megatron", active_when=MODEL_PARALLEL
    )
    router_replay: RouterReplayConfig = section(RouterReplayConfig, "router replay of a mixture of experts")
    checkpoint: ActorCheckpointConfig = section(ActorCheckpointConfig, "contents of a checkpoint")

    @property
    def loss_settings(self) -> dict[str, Any]:
        """The settings that the policy loss gets, without those of `algorithm.rollout_correction`."""
        of_loss = {**self.policy_loss.model_dump(), **self.policy_loss.loss_kwargs}
        return {**self.model_dump(), **of_loss, "policy_loss": of_loss}


def _of_actor(name: str) -> Any:
    """A field like that of the actor, whose value is the default."""
    return like(ActorConfig, name, f"${{actor_rollout_ref.actor.{name}}}")


class RefConfig(_RoleSection):
    """`actor_rollout_ref.ref`: the frozen reference policy of the KL."""

    enable: bool | None = field(None, "load the reference model; null: if a KL needs it")
    strategy: str = _of_actor("strategy")
    log_prob_micro_batch_size_per_gpu: int | None = like(RolloutConfig, "log_prob_micro_batch_size_per_gpu")
    log_prob_use_dynamic_bsz: bool = like(RolloutConfig, "log_prob_use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | None = like(RolloutConfig, "log_prob_max_token_len_per_gpu")
    fsdp_config: EngineConfig = section(
        EngineConfig,
        "precision, sharding and offloading",
        active_when=SHARDED,
        below=dict.fromkeys(("optimizer_offload", "stochastic_rounding"), ("strategy", never)),
    )
    megatron: RefMegatronConfig = section(
        RefMegatronConfig,
        "precision and parallelism of strategy=megatron",
        active_when=MODEL_PARALLEL,
        below=dict.fromkeys(_OF_TRAINING, ("strategy", never)),
    )


class CriticConfig(_RoleSection):
    """`critic`: the value model and its update."""

    enable: bool | None = field(None, "train a critic; null: if the advantage estimator reads values")
    strategy: str = _of_actor("strategy")
    ppo_mini_batch_size: int = _of_actor("ppo_mini_batch_size")
    ppo_micro_batch_size_per_gpu: int | None = _of_actor("ppo_micro_batch_size_per_gpu")
    forward_micro_batch_size_per_gpu: int | None = field(
        None,
        "sequences per forward pass when values are computed",
        default_from="${critic.ppo_micro_batch_size_per_gpu}",
        active_when=("use_dynamic_bsz", False),
        ge=1,
    )
    use_dynamic_bsz: bool = _of_actor("use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int | None = like(ActorConfig, "ppo_max_token_len_per_gpu")
    forward_max_token_len_per_gpu: int | None = field(
        None,
        "tokens per micro-batch when values are computed",
        default_from="${critic.ppo_max_token_len_per_gpu}",
        active_when=(("forward_micro_batch_size_per_gpu", None), ("use_dynamic_bsz", True)),
        ge=1,
    )
    ppo_epochs: int = _of_actor("ppo_epochs")
    shuffle: bool = _of_actor("shuffle")
    data_loader_seed: int = like(ActorConfig, "data_loader_seed")
    cliprange_value: float = field(0.5, "clip range of the value around the old value", gt=0)
    value_loss_coef: float = field(1.0, "coefficient of the value loss", gt=0)
    loss_agg_mode: LossAggregation | None = field(
        None, "how token losses are aggregated; null: token-mean", default_from=_ACTOR + "loss_agg_mode}"
    )
    loss_scale_factor: float | None = _of_actor("loss_scale_factor")
    model: CriticModelConfig = section(CriticModelConfig, "model that the critic starts from")
    optim: CriticOptimConfig = section(CriticOptimConfig, "optimizer")
    fsdp: EngineConfig = section(EngineConfig, "precision, sharding and offloading", active_when=SHARDED)
    megatron: RefMegatronConfig = section(
        RefMegatronConfig, "precision and parallelism of strategy=megatron", active_when=MODEL_PARALLEL
    )
    checkpoint: CriticCheckpointConfig = section(CriticCheckpointConfig, "contents of a checkpoint")
