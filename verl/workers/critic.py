"""The critic's worker: values, and their update."""

from typing import Any

from verl.config import schema
from verl.engines.metrics import MetricSums
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.build import make_engine, micro_batching, model_config, optimizer_config
from verl.workers.engine_worker import EngineWorker
from verl.workers.objectives import aggregation, value_objective


class CriticWorker(EngineWorker):
    """A value for every response token. config: the `critic` section. timeout: of a collective, in s."""

    def __init__(
        self, config: schema.CriticConfig, *, device: str, total_training_steps: int, timeout: float | None = None
    ):
        self.config = config
        self.checkpoint = config.checkpoint
        model = model_config(config.model, config.fsdp, device, self.local_rank, kind="value")
        optimizer = optimizer_config(config.optim, total_training_steps)
        self.engine = make_engine(model, config.fsdp, optimizer, self.world_size, timeout)

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
        """One pass over this rank's rows, as the actor's update."""
        config = self.config
        micro = micro_batching(
            config.ppo_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu
        )
        sums = MetricSums()
        with self.engine.loaded(optimizer=True):
            for mini in batch.split(batch.meta_info["mini_batch_rows"] // self.engine.dp_size):
                mask = mini.batch["response_mask"]
                agg = aggregation(config.loss_agg_mode, mask, self.engine, config.loss_scale_factor)
                objective = value_objective(config.cliprange_value, config.value_loss_coef, agg)
                metrics = self.engine.train_batch(mini, objective, micro)
                sums.add({name if "/" in name else f"critic/{name}": value for name, value in metrics.items()})
        lr = {"critic/lr": self.engine.lr_step()} if batch.meta_info["last_pass"] else {}
        return {**sums.result(), **lr}
