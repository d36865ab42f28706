"""The configuration of the policy in training, of its reference, and of the critic."""

from typing import Literal

from verl.config.fields import Node, key, part
from verl.config.schema.model import (
    ActorCheckpointConfig,
    CriticCheckpointConfig,
    CriticModelConfig,
    CriticOptimConfig,
    EngineConfig,
    OptimConfig,
    Strategy,
)

LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KLEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip

_ACTOR = "${actor_rollout_ref.actor."


class PolicyLossConfig(Node):
    """`actor_rollout_ref.actor.policy_loss`: which loss, and the numbers that only some losses have."""

    loss_mode: str = key("vanilla", "registered name of the policy loss")
    clip_cov_ratio: float = key(2e-4, "clip_cov: share of the tokens that lose their gradient", ge=0, le=1)
    clip_cov_lb: float = key(1.0, "clip_cov: tokens below this covariance are never chosen")
    clip_cov_ub: float = key(5.0, "clip_cov: tokens above this covariance are never chosen")
    kl_cov_ratio: float = key(2e-4, "kl_cov: share of the tokens that receive the penalty", ge=0, le=1)
    ppo_kl_coef: float | None = key(None, "kl_cov: weight of the penalty; null: the published value", ge=0)
    sppo_eta: float | None = key(None, "sppo: what the log-ratio is of an advantage of 1; null: 1", gt=0)
    dro_beta: float | None = key(None, "dro: weight of the quadratic term; the loss needs it", gt=0)


class ActorConfig(Node):
    """`actor_rollout_ref.actor`: the update of the policy."""

    strategy: Strategy = key("fsdp", "training engine")
    ppo_mini_batch_size: int = key(
        256, "PROMPTS per optimizer update, over all ranks (times rollout.n = responses); at most the batch", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "SEQUENCES per forward and backward pass of one rank; null: ppo_max_token_len_per_gpu decides", ge=1
    )
    use_dynamic_bsz: bool = key(False, "make micro-batches by a number of tokens instead of a number of sequences")
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        "tokens in a micro-batch of one rank, where no count is given or use_dynamic_bsz is on; null: 16384, or fewer "
        "on a GPU whose free memory does not hold them",
        ge=1,
    )
    ppo_epochs: int = key(1, "passes over each batch", ge=1)
    old_log_prob_pass: Literal["auto", "always"] = key(
        "auto", "log-probs before the update by a pass of their own; auto: not where the only update of a step has them"
    )
    shuffle: bool = key(False, "draw the mini-batches in a random order")
    data_loader_seed: int = key(42, "seed of that order", follows="${trainer.seed}", ge=0)
    clip_ratio: float | None = key(
        None, "clip of the probability ratio, both sides; null: the published value of the loss (PPO: 0.2)", ge=0
    )
    clip_ratio_low: float | None = key(None, "the ratio is kept above 1 - this", follows=_ACTOR + "clip_ratio}", ge=0)
    clip_ratio_high: float | None = key(None, "the ratio is kept below 1 + this", follows=_ACTOR + "clip_ratio}", ge=0)
    clip_ratio_c: float = key(3.0, "dual clip: bound of the loss where the advantage is negative", gt=1)
    tau_pos: float = key(1.0, "sapo: temperature where the advantage is positive", gt=0)
    tau_neg: float = key(1.05, "sapo: temperature where the advantage is not positive", gt=0)
    policy_loss: PolicyLossConfig = part(PolicyLossConfig, "which loss")
    loss_agg_mode: LossAggregation = key("token-mean", "how the losses of tokens become one number")
    loss_scale_factor: float | None = key(
        None, "divisor of seq-mean-token-sum-norm; null: the longest allowed response", gt=0
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    calculate_sum_pi_squared: bool = key(
        False, "measure sum over the vocabulary of p^2; optimal_token_baseline needs it"
    )
    use_kl_loss: bool = key(False, "add KL(policy, reference) to the loss")
    kl_loss_coef: float = key(0.001, "weight of that KL", ge=0)
    kl_loss_type: KLEstimator = key("low_var_kl", "estimator of that KL; with '+': its value, the gradient of k2")
    optim: OptimConfig = part(OptimConfig, "optimizer")
    fsdp_config: EngineConfig = part(EngineConfig, "precision, sharding, offloading")
    checkpoint: ActorCheckpointConfig = part(ActorCheckpointConfig, "what a checkpoint holds")


class RefConfig(Node):
    """`actor_rollout_ref.ref`: the frozen policy that a KL is measured against."""

    enable: bool | None = key(None, "build the reference model; null: where a KL needs it")
    strategy: Strategy = key("fsdp", "engine", follows=_ACTOR + "strategy}")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "sequences per forward pass of one rank", follows=_ACTOR + "ppo_micro_batch_size_per_gpu}", ge=1
    )
    log_prob_use_dynamic_bsz: bool = key(False, "micro-batches by tokens", follows=_ACTOR + "use_dynamic_bsz}")
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "tokens in a micro-batch of one rank", follows=_ACTOR + "ppo_max_token_len_per_gpu}", ge=1
    )
    fsdp_config: EngineConfig = part(EngineConfig, "precision, sharding, offloading")


class CriticConfig(Node):
    """`critic`: the value model and its update."""

    enable: bool | None = key(None, "train a critic; null: where the advantage estimator asks for values")
    strategy: Strategy = key("fsdp", "training engine", follows=_ACTOR + "strategy}")
    ppo_mini_batch_size: int = key(
        256, "PROMPTS per optimizer update, as for the actor", follows=_ACTOR + "ppo_mini_batch_size}", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "SEQUENCES per forward and backward pass of one rank",
        follows=_ACTOR + "ppo_micro_batch_size_per_gpu}",
        ge=1,
    )
    forward_micro_batch_size_per_gpu: int | None = key(
        None,
        "sequences per forward pass when values are computed",
        follows="${critic.ppo_micro_batch_size_per_gpu}",
        ge=1,
    )
    use_dynamic_bsz: bool = key(False, "micro-batches by tokens", follows=_ACTOR + "use_dynamic_bsz}")
    ppo_max_token_len_per_gpu: int | None = key(None, "tokens in a micro-batch of one rank; null: as the actor's", ge=1)
    forward_max_token_len_per_gpu: int | None = key(
        None, "the same when values are computed", follows="${critic.ppo_max_token_len_per_gpu}", ge=1
    )
    ppo_epochs: int = key(1, "passes over each batch", follows=_ACTOR + "ppo_epochs}", ge=1)
    shuffle: bool = key(False, "draw the mini-batches in a random order", follows=_ACTOR + "shuffle}")
    data_loader_seed: int = key(42, "seed of that order", follows="${trainer.seed}", ge=0)
    cliprange_value: float = key(0.5, "clip of the value around the old value", gt=0)
    value_loss_coef: float = key(1.0, "factor of the value loss", gt=0)
    loss_agg_mode: LossAggregation = key("token-mean", "how losses are added up", follows=_ACTOR + "loss_agg_mode}")
    loss_scale_factor: float | None = key(
        None, "divisor of seq-mean-token-sum-norm", follows=_ACTOR + "loss_scale_factor}", gt=0
    )
    model: CriticModelConfig = part(CriticModelConfig, "model that the critic starts from")
    optim: CriticOptimConfig = part(CriticOptimConfig, "optimizer")
    fsdp: EngineConfig = part(EngineConfig, "precision, sharding, offloading")
    checkpoint: CriticCheckpointConfig = part(CriticCheckpointConfig, "what a checkpoint holds")
