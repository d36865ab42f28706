"""The worker of supervised fine-tuning: imitates the response tokens of its rows."""

from typing import Any

from verl.config import schema
from verl.engines.metrics import MetricSums
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.build import make_engine, micro_batching, model_config, optimizer_config
from verl.workers.engine_worker import EngineWorker
from verl.workers.objectives import aggregation, sft_objective


class SFTWorker(EngineWorker):
    """One model that learns by imitation."""

    def __init__(self, config: schema.SFTConfig, *, total_training_steps: int):
        model = model_config(config.model, config.engine, config.trainer.device, self.local_rank)
        optimizer = optimizer_config(config.optim, total_training_steps)
        self.engine = make_engine(model, config.engine, optimizer, self.world_size)
        data = config.data
        self.micro = micro_batching(data.micro_batch_size_per_gpu, data.use_dynamic_bsz, data.max_token_len_per_gpu)
        self.checkpoint = config.checkpoint

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> dict[str, Any]:
        """One optimizer step on the batch."""
        agg = aggregation("token-mean", batch.batch["response_mask"], self.engine, None)
        metrics = self.engine.train_batch(batch, sft_objective(agg), self.micro)
        sums = MetricSums()
        sums.add({name if "/" in name else f"train/{name}": value for name, value in metrics.items()})
        return {**sums.result(), "train/lr": self.engine.lr_step()}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """The column old_log_probs, of the current weights."""
        found = self.engine.infer(batch, ("log_probs",), self.micro)
        return DataProto.from_dict({"old_log_probs": found["log_probs"]})
