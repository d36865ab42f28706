"""The critic's worker: computes values and updates the critic."""

from typing import Any

import torch

from verl.algorithms.kl import value_loss
from verl.algorithms.masked import LossAggregation
from verl.config import schema
from verl.engines.base import Objective, Tensors
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.engine_worker import EngineWorker, aggregation, micro_batching, update_micro_batching


class CriticWorker(EngineWorker):
    """Predicts a value for every response token. Trained on the returns. settings: those of `build_engine`."""

    def __init__(self, config: schema.CriticConfig, **settings: Any):
        self.config = config
        self.checkpoint = config.checkpoint
        sections = config.model, config.engine, config.optim
        self.engine = self.build_engine(config.strategy, *sections, kind="value", **settings)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        """Column `values`: entry t is the value of the state before response token t."""
        config = self.config
        micro = micro_batching(
            config.forward_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.forward_max_token_len_per_gpu
        )
        return DataProto.from_dict(self.engine.infer(batch, ("values",), micro))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, batch: DataProto) -> dict[str, Any]:
        """One pass over this rank's rows; reads the meta_info of `update_pass`."""
        config = self.config
        micro = update_micro_batching(config)
        with self.update_pass(batch, "critic") as update:
            for mini in update.mini_batches:
                mask = mini.batch["response_mask"]
                agg = aggregation(config.loss_agg_mode or "token-mean", mask, self.engine, config.loss_scale_factor)
                objective = value_objective(config.cliprange_value, config.value_loss_coef, agg)
                update.add(self.engine.train_batch(mini, objective, micro))
        return update.finish()


def value_objective(cliprange_value: float, loss_coef: float, agg: LossAggregation) -> Objective:
    """loss_coef * `value_loss`. agg: counts of the whole mini-batch; other arguments as for `value_loss`."""

    def critic_loss(outputs: Tensors, columns: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = columns["response_mask"]
        loss, metrics = value_loss(
            outputs["values"], columns["returns"], columns["values"], mask, agg, cliprange_value=cliprange_value
        )
        return loss_coef * loss, {**metrics, "critic/vf_loss": agg.share(loss, mask)}

    return Objective(critic_loss, ("values",))
