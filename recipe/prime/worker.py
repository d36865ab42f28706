"""The settings of PRIME, and the worker of its implicit process reward model (PRM) phi."""

from typing import Any, ClassVar, Literal

import torch

from verl.algorithms.prime import prime_loss
from verl.config import schema
from verl.config.fields import Section, field, section
from verl.config.public.aliases import PRIME
from verl.config.schema.model import CheckpointConfig, EngineConfig, OptimConfig
from verl.config.schema.ppo import Config
from verl.engines.base import Objective, Tensors
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.engine_worker import EngineWorker, update_micro_batching

_ACTOR = "${actor_rollout_ref.actor."


class PRMOptimConfig(OptimConfig):
    """`prime.optim`."""

    weight_decay: float = field(0.0, "decoupled weight decay", ge=0)
    clip_grad: float = field(10.0, "gradients are clipped to this norm", gt=0)


class PromptFilterConfig(Section):
    """`prime.filter`: generate for more prompts than a step trains on, and prefer those of medium accuracy."""

    enable: bool = field(True, "select among oversample_factor x train_batch_size prompts")
    oversample_factor: int = field(4, "prompts generated for each prompt that is trained on", ge=1)
    accuracy_lower_bound: float = field(0.2, "lowest accuracy of a preferred prompt", ge=0, le=1)
    accuracy_upper_bound: float = field(0.8, "highest accuracy of a preferred prompt", ge=0, le=1)
    filter_truncate: bool = field(True, "prefer prompts without a truncated response")


class PrimeSection(Section):
    """`prime`: the implicit process reward model, which starts as a copy of the policy."""

    beta: float = field(0.05, "reward of a token = beta * (log phi - log ref)", gt=0)
    update: Literal["before", "after"] = field("before", "update the reward model before or after it scores a batch")
    batch_norm: bool = field(True, "divide the rewards of a batch by its largest reward-to-go")
    ppo_mini_batch_size: int = field(
        256, "PROMPTS per optimizer update, as for the actor", default_from=_ACTOR + "ppo_mini_batch_size}", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = field(
        None,
        "SEQUENCES per micro-batch of one rank",
        default_from=_ACTOR + "ppo_micro_batch_size_per_gpu}",
        ge=1,
    )
    use_dynamic_bsz: bool = field(False, "micro-batches by tokens", default_from=_ACTOR + "use_dynamic_bsz}")
    ppo_max_token_len_per_gpu: int | None = field(
        None, "tokens in a micro-batch of one rank", default_from=_ACTOR + "ppo_max_token_len_per_gpu}", ge=1
    )
    optim: PRMOptimConfig = section(PRMOptimConfig, "optimizer")
    fsdp_config: EngineConfig = section(EngineConfig, "precision, sharding, offloading")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what a checkpoint holds")
    filter: PromptFilterConfig = section(PromptFilterConfig, "selection of prompts")


class PrimeConfig(Config):
    """The root of a PRIME configuration."""

    aliases: ClassVar = PRIME

    prime: PrimeSection = section(PrimeSection, "implicit process reward model")


class ImplicitPRMWorker(EngineWorker):
    """The model phi, which starts as a copy of the policy. config: the section `prime`; policy: `actor_rollout_ref`."""

    def __init__(
        self, config: PrimeSection, policy: schema.ActorRolloutRefConfig, *, device: str, total_training_steps: int
    ):
        self.config = config
        self.checkpoint = config.checkpoint
        self.temperature = policy.rollout.temperature
        self.micro = update_micro_batching(config)
        self.engine = self.build_engine(
            policy.actor.strategy,
            policy.model,
            config.fsdp_config,
            config.optim,
            device=device,
            total_training_steps=total_training_steps,
            timeout=policy.nccl_timeout,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_prm_log_prob(self, batch: DataProto) -> DataProto:
        """The column prm_log_prob, at the temperature of the policy and the reference."""
        output = self.engine.infer(batch, ("log_probs",), self.micro, temperature=self.temperature)
        return DataProto.from_dict({"prm_log_prob": output["log_probs"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_prm(self, batch: DataProto) -> dict[str, Any]:
        """One pass over this rank's rows. Reads ref_log_prob, acc (B,) and the meta_info of `update_pass`."""
        with self.update_pass(batch, "prm") as update:
            for mini in update.mini_batches:
                (num_sequences,) = self.engine.sum_over_ranks([float(len(mini))])
                objective = prm_objective(self.config.beta, num_sequences)
                update.add(self.engine.train_batch(mini, objective, self.micro, temperature=self.temperature))
        return update.finish()


def prm_objective(beta: float, num_sequences: float) -> Objective:
    """Cross-entropy of the sum of beta * (log phi - log ref) against the outcome.

    Args:
        beta: reward of a token = beta * (log phi - log ref).
        num_sequences: sequences of the whole mini-batch, over all ranks.
    """

    def loss(outputs: Tensors, rows: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
        log_ratio = outputs["log_probs"] - rows["ref_log_prob"]
        return prime_loss(log_ratio, rows["acc"], rows["response_mask"], beta=beta, num_sequences=num_sequences)

    return Objective(loss, ("log_probs",))
