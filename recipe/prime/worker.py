"""The worker of the implicit process reward model phi: its log-probs, and its update from outcomes."""

from typing import Any

import torch

from recipe.prime.config import PrimeSection
from verl.algorithms.prime import prime_loss
from verl.config import schema
from verl.engines.base import Objective, Tensors
from verl.engines.metrics import MetricSums
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.build import make_engine, micro_batching, model_config, optimizer_config
from verl.workers.engine_worker import EngineWorker


class ImplicitPRMWorker(EngineWorker):
    """config: the section `prime`. policy: the section `actor_rollout_ref`, whose model phi starts from."""

    def __init__(
        self, config: PrimeSection, policy: schema.ActorRolloutRefConfig, *, device: str, total_training_steps: int
    ):
        self.config = config
        self.checkpoint = config.checkpoint
        self.temperature = policy.rollout.temperature
        self.micro = micro_batching(
            config.ppo_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu
        )
        model = model_config(policy.model, config.fsdp_config, device, self.local_rank)
        optimizer = optimizer_config(config.optim, total_training_steps)
        self.engine = make_engine(model, config.fsdp_config, optimizer, self.world_size, policy.nccl_timeout)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_prm_log_prob(self, batch: DataProto) -> DataProto:
        """The column prm_log_prob, at the temperature of the policy's and the reference's log-probs."""
        found = self.engine.infer(batch, ("log_probs",), self.micro, temperature=self.temperature)
        return DataProto.from_dict({"prm_log_prob": found["log_probs"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_prm(self, batch: DataProto) -> dict[str, Any]:
        """One pass over this rank's rows in mini-batches, as the actor's update. Reads ref_log_prob and acc (B,)."""
        sums = MetricSums()
        with self.engine.loaded(optimizer=True):
            for mini in batch.split(batch.meta_info["mini_batch_rows"] // self.engine.dp_size):
                (num_sequences,) = self.engine.sum_over_ranks([float(len(mini))])
                objective = prm_objective(self.config.beta, num_sequences)
                metrics = self.engine.train_batch(mini, objective, self.micro, temperature=self.temperature)
                sums.add({name if "/" in name else f"prm/{name}": value for name, value in metrics.items()})
        lr = {"prm/lr": self.engine.lr_step()} if batch.meta_info["last_pass"] else {}
        return {**sums.result(), **lr}


def prm_objective(beta: float, num_sequences: float) -> Objective:
    """Cross-entropy of the sum of beta * (log phi - log ref) against the outcome; num_sequences of the mini-batch."""

    def loss(outputs: Tensors, rows: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
        log_ratio = outputs["log_probs"] - rows["ref_log_prob"]
        return prime_loss(log_ratio, rows["acc"], rows["response_mask"], beta=beta, num_sequences=num_sequences)

    return Objective(loss, ("log_probs",))
