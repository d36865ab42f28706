"""Workers with a training engine: their base class (construction, update loop and checkpoints), and that of SFT."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from verl.algorithms.kl import sft_nll
from verl.algorithms.masked import LossAggregation
from verl.checkpoints.manifest import DELETE
from verl.columns import find_bad_values
from verl.config import schema
from verl.engines.base import EngineSpec, MicroBatching, Objective, TrainEngine, make_engine
from verl.engines.micro_batch import MetricSums
from verl.modeling.huggingface import read_config
from verl.planner.devices import known_gpu
from verl.planner.shapes import ModelShape
from verl.protocol import DataProto
from verl.single_controller.dispatch import Coordinates, Dispatch, register
from verl.single_controller.worker import Worker
from verl.utils.device import resolve_device
from verl.utils.disk import file_sizes

logger = logging.getLogger("verl.workers")


class EngineWorker(Worker):
    """A worker with a training engine."""

    engine: TrainEngine
    checkpoint: schema.CheckpointConfig
    _utilization: "Utilization | None" = None

    def build_engine(
        self,
        strategy: str,
        model: schema.ModelConfig,
        engine: schema.EngineConfig | schema.MegatronConfig,
        optimizer: schema.OptimConfig | None = None,
        *,
        device: str,
        kind: Literal["causal_lm", "value", "reward"] = "causal_lm",
        **settings: Any,
    ) -> TrainEngine:
        """Make the engine registered as `strategy` on this rank. device: `trainer.device`; other arguments as in
        `EngineSpec`."""
        spec = EngineSpec(
            kind,
            model,
            engine,
            optimizer,
            **settings,
            device=resolve_device(device, self.local_rank),
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
        )
        built = make_engine(strategy, spec)
        if optimizer is not None:
            ranks = self.world_size // built.dp_size
            self._utilization = Utilization.find(model, kind, spec.device, ranks, engine.dtype)
        return built

    def layout(self, mesh: str | None = None) -> Coordinates:
        """Samples are split over the data-parallel ranks of the engine; model-parallel ranks get the same samples."""
        if mesh is None:
            engine = self.engine
            return Coordinates(dp=engine.dp_rank, tp=engine.model_parallel_rank, pp=engine.pipeline_rank)
        return super().layout(mesh)

    @contextmanager
    def update_pass(self, batch: DataProto, prefix: str, *, one_step: bool = False) -> Iterator["UpdatePass"]:
        """One pass over this rank's rows with an optimizer step per mini-batch: the update loop of every worker.

            with self.update_pass(batch, "actor") as update:
                for mini in update.mini_batches:
                    update.add(self.engine.train_batch(mini, objective, micro))
            return update.finish()

        The weights and the optimizer state stay on the device in between. There are no mini-batches if a column of the
        batch has values that are not finite or too large (`find_bad_values`).

        Args:
            batch: reads meta_info["mini_batch_rows"], the rows of one optimizer step over all ranks, and
                meta_info["last_pass"], whether this is the last pass of the training step.
            prefix: put before metric names that have none ("grad_norm" -> "actor/grad_norm").
            one_step: treat the whole batch as one mini-batch and one training step; meta_info is not read.
        """
        minis = [batch] if one_step else batch.split(batch.meta_info["mini_batch_rows"] // self.engine.dp_size)
        update = UpdatePass(self.engine, minis, prefix, last_pass=one_step or batch.meta_info["last_pass"])
        bad = find_bad_values(batch.tensors)
        if any(self.engine.max_over_ranks([float(bool(bad))])):
            for column in bad:
                logger.error("%s: column %r has %s: the updates are skipped", prefix, column.column, column)
            update.skip()
        start = time.perf_counter()
        with self.engine.on_device(optimizer=True):
            yield update
            update.check_weights()
        if self._utilization is not None and update.mini_batches:
            torch.cuda.synchronize(resolve_device("cuda", self.local_rank))
            update.add({f"perf/mfu/{prefix}": (self._utilization.mfu(batch, time.perf_counter() - start), 1)})

    # ---- checkpoints --------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def non_finite_state(self) -> list[str]:
        """Names of the trained weights and optimizer state that are broken (`TrainEngine.non_finite_state`)."""
        return self.engine.non_finite_state()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str | Path) -> None:
        """Write the model, its optimizer and schedule under `folder`. With checkpoint.async_save the write continues in
        the background until `finish_checkpoint`."""
        self.engine.save(Path(folder), tuple(self.checkpoint.save_contents), self.checkpoint.async_save)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_checkpoint_written(self) -> bool:
        """Whether no background write is running, successful or not."""
        return self.engine.is_saved()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> None:
        """Wait for the background write. Raises its error."""
        self.engine.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def list_files(self, folder: str | Path) -> dict[str, int]:
        """The files below a folder as this rank sees them: relative path -> bytes."""
        return file_sizes(Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str | Path) -> list[str]:
        """Restore what `save_checkpoint` wrote, limited to checkpoint.load_contents.

        Returns:
            The contents ("optimizer", "extra") that were not restored.

        Raises:
            ValueError: it is damaged, or of another model.
        """
        contents = tuple(self.checkpoint.load_contents)
        try:
            self.engine.load(Path(folder), contents)
        except (SafetensorError, KeyError, IndexError, TypeError, AttributeError) as error:
            logger.error("%s cannot be restored", folder, exc_info=error)
            raise ValueError(
                f"{folder} is damaged, of another version, or a `load_state_dict` failed (the log has the stack): "
                f"{error!r}: if it is damaged, {DELETE}"
            ) from error
        return [name for name in ("optimizer", "extra") if name not in contents]


class UpdatePass:
    """The mini-batches of one pass, in order (this rank's share of each), and their metrics."""

    def __init__(self, engine: TrainEngine, mini_batches: list[DataProto], prefix: str, last_pass: bool):
        self.mini_batches = mini_batches
        self._engine = engine
        self._prefix = prefix
        self._last_pass = last_pass
        self._sums = MetricSums()
        self._broken: list[str] = []

    def skip(self) -> None:
        """Skip all updates of this pass, which are counted in `grad_skipped`."""
        for _ in self.mini_batches:
            self.add({"grad_skipped": 1.0})
        self.mini_batches = []

    def check_weights(self) -> None:
        """After the last pass, look for weights and optimizer state that are broken; reported by `finish`."""
        if self._last_pass:
            self._broken = self._engine.non_finite_state()

    def add(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of a mini-batch."""
        self._sums.add({name if "/" in name else f"{self._prefix}/{name}": value for name, value in metrics.items()})

    def finish(self) -> dict[str, Any]:
        """Advance the learning-rate schedule after the last pass of a training step. Returns metric name -> (sum,
        count), and "<prefix>/lr" after the last pass; "<prefix>/broken_tensors" if there are."""
        lr = {f"{self._prefix}/lr": self._engine.lr_step()} if self._last_pass else {}
        broken = {f"{self._prefix}/broken_tensors": (float(len(self._broken)), 1.0)} if self._broken else {}
        return {**self._sums.result(), **lr, **broken}


def micro_batching(rows: int | None, dynamic: bool, tokens: int | None) -> MicroBatching:
    """The split that the micro-batch keys configure.

    Args:
        rows: sequences per micro-batch (*_micro_batch_size_per_gpu).
        dynamic: split by tokens even if `rows` is given (*_use_dynamic_bsz).
        tokens: token budget (*_max_token_len_per_gpu); None: as many tokens as fit.
    """
    return MicroBatching(rows=rows) if rows is not None and not dynamic else MicroBatching(tokens=tokens or "auto")


def update_micro_batching(config: Any) -> MicroBatching:
    """The split of an update, of a section with the ppo_* keys."""
    return micro_batching(config.ppo_micro_batch_size_per_gpu, config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu)


def aggregation(
    mode: str, response_mask: torch.Tensor, engine: TrainEngine, scale_factor: float | None = None
) -> LossAggregation:
    """The loss aggregation of a mini-batch; every term of its loss is divided by the same counts.

    Args:
        response_mask: (b, T) of this rank's rows of the mini-batch. Counts are summed over the ranks.
        scale_factor: divisor of "seq-mean-token-sum-norm"; None for T.
    """
    tokens = response_mask.bool()
    counts = engine.sum_over_ranks([float(tokens.sum()), float(tokens.any(-1).sum())])
    return LossAggregation(mode, *counts, scale_factor=scale_factor or tokens.shape[-1])


# ---- supervised fine-tuning (SFT): maximizes the likelihood of the response tokens -----------------------------------


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


# ---- model FLOPs utilization (MFU) of updates -----------------------------------------------------------------------

# The share of a GPU's peak rate that the model's own operations use.
# Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix B. FLOPs: matmuls with the weights, causal attention, and
# the logits of the response tokens; three times the forward pass for an update, twice with LoRA, whose base weights get
# no gradient. Recomputed activations, vision towers and adapters do not count.


def forward_flops(shape: ModelShape, lengths: Sequence[int], outputs: int, value_head: bool = False) -> float:
    """FLOPs of a forward pass.

    Args:
        lengths: tokens of each row.
        outputs: positions at which logits are computed.
        value_head: one output instead of logits.
    """
    head = shape.hidden if value_head else shape.embedding
    attention = 4 * shape.q_size * shape.layers * sum(length * (length + 1) / 2 for length in lengths)
    return 2 * (sum(lengths) * shape.matrices() + outputs * head) + attention


@dataclass(frozen=True)
class Utilization:
    """The shape of a model and the peak rate of its ranks."""

    shape: ModelShape
    peak: float  # FLOP/s in 16 bits of all ranks that share a row
    passes: int  # FLOPs of an update, as a multiple of those of a forward pass
    value_head: bool  # whether the model has one output instead of logits

    @classmethod
    def find(
        cls, model: schema.ModelConfig, kind: str, device: torch.device, ranks: int, dtype: str
    ) -> "Utilization | None":
        """The utilization of a model; None if its shape or the peak rate of the device is unknown, or in float32. kind:
        as in `EngineSpec`. ranks: those that share a row. dtype: of the computation."""
        if device.type != "cuda" or dtype in ("fp32", "float32"):
            return None
        gpu = known_gpu(torch.cuda.get_device_name(device))
        try:
            config = read_config(model.path, model.override_config, model.trust_remote_code)
            shape = ModelShape.from_config(config.get_text_config().to_dict())
        except ValueError:
            return None
        if gpu is None:
            return None
        return cls(shape, gpu.peak * ranks, 2 if model.has_adapters else 3, kind == "value")

    def mfu(self, batch: DataProto, seconds: float) -> float:
        """The MFU of one pass over a batch (attention_mask, responses) in this time."""
        lengths = batch.column("attention_mask").sum(-1).tolist()
        outputs = int(batch.column("response_mask").count_nonzero())
        flops = self.passes * forward_flops(self.shape, lengths, outputs, self.value_head)
        return flops / (seconds * self.peak)
