"""The critic's worker: values, and their update."""

from typing import Any

from verl.config import schema
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.engine_worker import EngineWorker, micro_batching
from verl.workers.objectives import aggregation, value_objective


class CriticWorker(EngineWorker):
    """Predicts a value for every response token, and learns from the returns.

    Args:
        config: the `critic` section.
        device: `trainer.device`.
        total_training_steps: length of the run, for the learning-rate schedule.
        timeout: seconds a collective waits for the other ranks.
    """

    def __init__(
        self, config: schema.CriticConfig, *, device: str, total_training_steps: int, timeout: float | None = None
    ):
        self.config = config
        self.checkpoint = config.checkpoint
        self.engine = self.build_engine(
            config.strategy,
            config.model,
            config.fsdp,
            config.optim,
            kind="value",
            device=device,
            total_training_steps=total_training_steps,
            timeout=timeout,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        """The column `values`: at t, the value before response token t."""
        config = self.config
        micro = micro_batching(
            config.forward_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.forward_max_token_len_per_gpu
        )
        return DataProto.from_dict(self.engine.infer(batch, ("values",), micro))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, batch: DataProto) -> dict[str, Any]:
        """One pass over this rank's rows; reads the meta_info of `update_pass`."""
        config = self.config
        micro = micro_batching(
            config.ppo_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu
        )
        with self.update_pass(batch, "critic") as update:
            for mini in update.mini_batches:
                mask = mini.batch["response_mask"]
                agg = aggregation(config.loss_agg_mode, mask, self.engine, config.loss_scale_factor)
                objective = value_objective(config.cliprange_value, config.value_loss_coef, agg)
                update.add(self.engine.train_batch(mini, objective, micro))
        return update.finish()
