"""The worker of supervised fine-tuning (SFT): maximizes the likelihood of the response tokens."""

from typing import Any

from verl.algorithms.kl import sft_nll
from verl.algorithms.masked import LossAggregation
from verl.config import schema
from verl.engines.base import Objective
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.engine_worker import EngineWorker, aggregation, micro_batching


class SFTWorker(EngineWorker):
    """One model that is fine-tuned on demonstrations."""

    def __init__(self, config: schema.SFTConfig, *, total_training_steps: int):
        data = config.data
        self.checkpoint = config.checkpoint
        self.micro = micro_batching(data.micro_batch_size_per_gpu, data.use_dynamic_bsz, data.max_token_len_per_gpu)
        self.engine = self.build_engine(
            config.engine.strategy,
            config.model,
            config.engine.selected,
            config.optim,
            device=config.trainer.device,
            total_training_steps=total_training_steps,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> dict[str, Any]:
        """One optimizer step on the batch."""
        with self.update_pass(batch, "train", one_step=True) as update:
            for mini in update.mini_batches:
                agg = aggregation("token-mean", mini.batch["response_mask"], self.engine)
                update.add(self.engine.train_batch(mini, sft_objective(agg), self.micro))
        return update.finish()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Column old_log_probs, with the current weights."""
        values = self.engine.infer(batch, ("log_probs",), self.micro)
        return DataProto.from_dict({"old_log_probs": values["log_probs"]})


def sft_objective(agg: LossAggregation) -> Objective:
    """Negative log-likelihood of the response tokens; agg: counts of the whole mini-batch."""
    return Objective(lambda outputs, columns: sft_nll(outputs["log_probs"], columns["response_mask"], agg))
