"""The keys that PRIME adds to the configuration: the section `prime`."""

from typing import Literal

from verl.config.fields import Section, field, section
from verl.config.schema.model import CheckpointConfig, EngineConfig, OptimConfig
from verl.config.schema.ppo import Config

_ACTOR = "${actor_rollout_ref.actor."


class PRMOptimConfig(OptimConfig):
    """`prime.optim`."""

    weight_decay: float = field(0.0, "decoupled weight decay", ge=0)
    clip_grad: float = field(10.0, "largest norm of the gradient of a mini-batch; larger ones are scaled down", gt=0)


class PromptFilterConfig(Section):
    """`prime.filter`: more prompts are answered than a step trains on, and those of middling accuracy are taken."""

    enable: bool = field(True, "choose among oversample_factor x train_batch_size prompts")
    oversample_factor: int = field(4, "prompts that are answered for each one that is trained on", ge=1)
    accuracy_lower_bound: float = field(0.2, "least share of right answers of a prompt that is preferred", ge=0, le=1)
    accuracy_upper_bound: float = field(0.8, "largest share of right answers of a prompt that is preferred", ge=0, le=1)
    filter_truncate: bool = field(True, "prefer prompts of which no answer was cut off at the limit")


class PrimeSection(Section):
    """`prime`: the implicit process reward model, which starts as a copy of the policy."""

    beta: float = field(0.05, "reward of a token = beta * (log phi - log ref)", gt=0)
    update: Literal["before", "after"] = field("before", "the model learns from a batch before, or after, it scores it")
    batch_norm: bool = field(True, "divide the rewards of a batch by the largest reward to go in it")
    ppo_mini_batch_size: int = field(
        256, "PROMPTS per optimizer update, as for the actor", default_from=_ACTOR + "ppo_mini_batch_size}", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = field(
        None, "SEQUENCES per pass of one rank", default_from=_ACTOR + "ppo_micro_batch_size_per_gpu}", ge=1
    )
    use_dynamic_bsz: bool = field(False, "micro-batches by tokens", default_from=_ACTOR + "use_dynamic_bsz}")
    ppo_max_token_len_per_gpu: int | None = field(
        None, "tokens in a micro-batch of one rank", default_from=_ACTOR + "ppo_max_token_len_per_gpu}", ge=1
    )
    optim: PRMOptimConfig = section(PRMOptimConfig, "optimizer")
    fsdp_config: EngineConfig = section(EngineConfig, "precision, sharding, offloading")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what a checkpoint holds")
    filter: PromptFilterConfig = section(PromptFilterConfig, "which prompts are trained on")


class PrimeConfig(Config):
    """The root, with the section of PRIME."""

    prime: PrimeSection = section(PrimeSection, "implicit process reward model")
