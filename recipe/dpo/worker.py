"""The policy's worker with DPO's update.

A pair's loss needs the log-probs of both answers at once, but engines cut a mini-batch into micro-batches as memory
allows. So the update has two passes: the first computes the log-prob of every answer without gradient, and from it
d loss / d log-prob; the second is a sum weighted by that, which may be cut in any way. The gradient is the same.
"""

from collections.abc import Callable
from typing import Any

import torch

from recipe.dpo.config import DPOSection
from verl.algorithms.policy_losses import LossAndMetrics
from verl.algorithms.preference import dpo_loss, sequence_log_prob
from verl.engines.base import Objective, Tensors
from verl.engines.metrics import MetricSums
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.actor_rollout_ref import ActorRolloutWorker
from verl.workers.build import micro_batching

Pairs = tuple[torch.Tensor, torch.Tensor]


class DPOActorWorker(ActorRolloutWorker):
    """dpo: the section `dpo`; everything else as for the actor of the main trainer."""

    def __init__(self, *args: Any, dpo: DPOSection, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.dpo = dpo

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_dpo(self, batch: DataProto) -> dict[str, Any]:
        """One pass over this rank's pairs, rows 2i (better) and 2i + 1 (worse); `pair_weight` 0 marks a tie.

        Reads ref_log_prob, and the facts that `update_actor` reads.
        """
        actor, temperature = self.config.actor, self.config.rollout.temperature
        micro = micro_batching(
            actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu
        )
        sums = MetricSums()
        with self.engine.loaded(optimizer=True):
            for mini in batch.split(batch.meta_info["mini_batch_rows"] // self.engine.dp_size):
                log_probs = self.engine.infer(mini, ("log_probs",), micro, temperature=temperature)["log_probs"]
                (num_pairs,) = self.engine.sum_over_ranks([mini.batch["pair_weight"].sum().item() / 2])
                weights, metrics = sequence_weights(log_probs, mini.tensors, num_pairs, self.pair_loss)
                sums.add(metrics)
                mini = mini.replace(sequence_weight=weights)
                found = self.engine.train_batch(mini, WEIGHTED_LOG_PROB, micro, temperature=temperature)
                sums.add({f"actor/{name}": value for name, value in found.items()})
                self.version += 1
        lr = {"actor/lr": self.engine.lr_step()} if batch.meta_info["last_pass"] else {}
        return {**sums.result(), **lr}

    def pair_loss(self, policy: Pairs, reference: Pairs, lengths: Pairs, num_pairs: float) -> LossAndMetrics:
        """The loss of N pairs, divided by num_pairs, those of the whole mini-batch. Override it for another one.

        policy, reference: log-probs of the better and of the worse answers, (N,) each; lengths: their tokens.
        """
        settings = self.dpo.model_dump(include={"beta", "loss_type", "label_smoothing"})
        return dpo_loss(*policy, *reference, num_pairs=num_pairs, **settings)


def sequence_weights(
    log_probs: torch.Tensor, rows: Tensors, num_pairs: float, pair_loss: Callable[..., LossAndMetrics]
) -> LossAndMetrics:
    """d loss / d (log-prob of each answer), (B,), and the metrics of the loss.

    log_probs: (B, T), of the current policy. num_pairs: of the whole mini-batch, ties not counted. A tie gets 0.
    """
    mask, real = rows["response_mask"], rows["pair_weight"][0::2].bool()

    def pairs(sequences: torch.Tensor) -> Pairs:
        return sequences[0::2][real], sequences[1::2][real]

    policy = sequence_log_prob(log_probs, mask).requires_grad_()
    reference = sequence_log_prob(rows["ref_log_prob"], mask)
    loss, metrics = pair_loss(pairs(policy), pairs(reference), pairs(mask.sum(-1)), num_pairs)
    (weights,) = torch.autograd.grad(loss, policy)
    return weights, {**metrics, "dpo/loss": (loss.detach() * num_pairs, real.sum())}


def _weighted_log_prob(outputs: Tensors, rows: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
    sequences = sequence_log_prob(outputs["log_probs"], rows["response_mask"])
    return (rows["sequence_weight"] * sequences).sum(), {}


WEIGHTED_LOG_PROB = Objective(_weighted_log_prob, ("log_probs",))
"""sum over answers of sequence_weight * log-prob: its gradient is that of the loss which the weights come from."""
