"""The settings of DPO, and the actor's worker with its update.

The loss of a pair needs the log-probs of both responses at once, but engines split a mini-batch into micro-batches as
memory allows. So the update has two passes: the first computes the log-prob of every response without gradient, and
from it d loss / d log-prob; the second is a sum weighted by that, which may be split in any way. The gradient is the
same.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

from verl.algorithms.policy_losses import LossAndMetrics
from verl.config.fields import Section, field, section
from verl.config.schema.ppo import Config
from verl.engines.base import Objective, Tensors
from verl.protocol import DataProto
from verl.recipe.dpo.losses import dpo_loss, sequence_log_prob
from verl.single_controller import Dispatch, register
from verl.workers.engine_worker import update_micro_batching
from verl.workers.policy import ActorWorker

Pairs = tuple[torch.Tensor, torch.Tensor]


class DPOSection(Section):
    """`dpo`: where the pairs come from, and their loss."""

    answers: Literal["policy", "file"] = field("policy", "policy: generated, compared by reward; file: given")
    chosen_key: str = field("chosen", "file: the column of the chosen responses")
    rejected_key: str = field("rejected", "file: the column of the rejected responses")
    beta: float = field(0.1, "strength of the KL constraint to the reference", gt=0)
    loss_type: Literal["sigmoid", "ipo"] = field("sigmoid", "DPO, or IPO (a squared error, which does not saturate)")
    label_smoothing: float = field(0.0, "sigmoid: share of preferences assumed to be wrong", ge=0, lt=0.5)


class DPOConfig(Config):
    """The root of a DPO configuration."""

    dpo: DPOSection = section(DPOSection, "DPO")


class DPOActorWorker(ActorWorker):
    """The policy, trained on pairs. dpo: the section `dpo`; other arguments as for `ActorWorker`."""

    def __init__(self, *args: Any, dpo: DPOSection, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.dpo = dpo

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_dpo(self, batch: DataProto) -> dict[str, Any]:
        """One pass over this rank's pairs, rows 2i (chosen) and 2i + 1 (rejected); `pair_weight` 0 marks a tie.

        Reads ref_log_prob and the meta_info of `update_pass`.
        """
        actor, temperature = self.config.actor, self.config.rollout.temperature
        micro = update_micro_batching(actor)
        with self.update_pass(batch, "actor") as update:
            for mini in update.mini_batches:
                log_probs = self.engine.infer(mini, ("log_probs",), micro, temperature=temperature)["log_probs"]
                (num_pairs,) = self.engine.sum_over_ranks([mini.batch["pair_weight"].sum().item() / 2])
                weights, metrics = sequence_weights(log_probs, mini.tensors, num_pairs, self.pair_loss)
                update.add(metrics)
                weighted = mini.replace(sequence_weight=weights)
                update.add(self.engine.train_batch(weighted, WEIGHTED_LOG_PROB, micro, temperature=temperature))
        return update.finish()

    def pair_loss(self, policy: Pairs, reference: Pairs, lengths: Pairs, num_pairs: float) -> LossAndMetrics:
        """The loss of N pairs. Override it to change the loss.

        Args:
            policy, reference: log-probs of the chosen and rejected responses, (N,) each.
            lengths: numbers of tokens of the chosen and rejected responses.
            num_pairs: pairs of the whole mini-batch; divides the loss.
        """
        settings = self.dpo.model_dump(include={"beta", "loss_type", "label_smoothing"})
        return dpo_loss(*policy, *reference, num_pairs=num_pairs, **settings)


def sequence_weights(
    log_probs: torch.Tensor, rows: Tensors, num_pairs: float, pair_loss: Callable[..., LossAndMetrics]
) -> LossAndMetrics:
    """d loss / d (log-prob of each response), (B,), and the metrics of the loss. A tie gets 0.

    Args:
        log_probs: (B, T) of the current policy.
        rows: tensor columns of the pairs.
        num_pairs: pairs of the whole mini-batch, without ties.
        pair_loss: as `DPOActorWorker.pair_loss`.
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
"""Sum over responses of sequence_weight * log-prob: its gradient is that of the loss that the weights come from."""
