"""The worker of the implicit process reward model phi: its log-probs, and its update from outcome rewards.

PRIME (Cui et al. 2025, arXiv 2502.01456).
"""

from typing import Any

import torch

from recipe.prime.config import PrimeSection
from verl.algorithms.prime import prime_loss
from verl.config import schema
from verl.engines.base import Objective, Tensors
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.engine_worker import EngineWorker, micro_batching


class ImplicitPRMWorker(EngineWorker):
    """The model phi, which starts as a copy of the policy.

    Args:
        config: the section `prime`.
        policy: the section `actor_rollout_ref`.
        device: `trainer.device`.
        total_training_steps: length of the run, for the learning-rate schedule.
    """

    def __init__(
        self, config: PrimeSection, policy: schema.ActorRolloutRefConfig, *, device: str, total_training_steps: int
    ):
        self.config = config
        self.checkpoint = config.checkpoint
        self.temperature = policy.rollout.temperature
        self.micro = micro_batching(
            config.ppo_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu
        )
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
        """The column prm_log_prob, at the temperature of the policy's and the reference's log-probs."""
        found = self.engine.infer(batch, ("log_probs",), self.micro, temperature=self.temperature)
        return DataProto.from_dict({"prm_log_prob": found["log_probs"]})

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
