"""The worker of supervised fine-tuning: imitates the response tokens of its rows."""

from pathlib import Path
from typing import Any

from verl.algorithms.masked import masked_sum
from verl.engines.base import MicroBatching, OptimizerConfig
from verl.engines.hf import HFEngine
from verl.engines.metrics import MetricSums
from verl.engines.model import ModelConfig
from verl.protocol import DataProto
from verl.single_controller import Dispatch, Worker, register
from verl.workers.objectives import aggregation, sft_objective


class SFTWorker(Worker):
    """One model that learns by imitation. contents: what a checkpoint holds."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, micro: MicroBatching, contents: tuple[str, ...]):
        self.engine = HFEngine(model, optimizer)
        self.micro = micro
        self.contents = contents

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> dict[str, Any]:
        """One optimizer step on the batch."""
        agg = aggregation("token-mean", batch.batch["response_mask"], self.engine, None)
        metrics = self.engine.train_batch(batch, sft_objective(agg), self.micro)
        sums = MetricSums()
        sums.add({name if "/" in name else f"train/{name}": value for name, value in metrics.items()})
        return {**sums.result(), "train/lr": self.engine.lr_step()}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def evaluate(self, batch: DataProto) -> dict[str, Any]:
        """The loss on the batch without an update: val/loss, mean over tokens."""
        log_probs = self.engine.infer(batch, ("log_probs",), self.micro)["log_probs"]
        mask = batch.batch["response_mask"]
        return {"val/loss": (-masked_sum(log_probs, mask).item(), float(mask.sum()))}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str | Path) -> None:
        """Write the model, its optimizer and schedule under `folder`."""
        self.engine.save(Path(folder), self.contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str | Path) -> None:
        """Restore what `save_checkpoint` wrote."""
        self.engine.load(Path(folder), self.contents)
