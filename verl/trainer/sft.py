"""Supervised fine-tuning (SFT) on the same loop: samples -> update."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from verl.algorithms.masked import masked_sum
from verl.config import schema
from verl.config.sources import Overrides
from verl.data.sft_dataset import SFTDataset, collate_sft
from verl.dataflow import DataFlow, Operator
from verl.protocol import DataProto
from verl.single_controller import WorkerSpec
from verl.single_controller.cluster import Cluster, ResourcePool
from verl.tracking.formatting import counted
from verl.tracking.tracking import setup_logging
from verl.trainer.base import Trainer
from verl.trainer.checks.preflight import INPUTS, Recipe, Settings, recipe_of, run_checks
from verl.trainer.startup.arguments import prepare_run
from verl.trainer.startup.inputs import load_sft_inputs, prompt_source
from verl.trainer.state.checkpointing import describe_saving
from verl.workers.engine_worker import SFTWorker

logger = logging.getLogger("verl.trainer")


class SFTTrainer(Trainer):
    """Supervised fine-tuning (SFT) on the responses of a dataset, on one host.

    Args:
        config: a YAML file, a dictionary with nested or dotted keys, an SFTConfig, or None for overrides alone.
        config_path: the same as config, for a file.
        overrides: settings above those of config: "key=value" strings, or a dictionary.
        train_dataset, val_dataset: rows (a list of dicts, or a Hugging Face dataset), a torch dataset, or paths; None:
            the files of the configuration.
        model: a model object of transformers, with its tokenizer, instead of model.path. It is not changed.
        tokenizer: None: that of the model.
        cluster: where the workers run; None: chosen by trainer.backend and the number of processes.
    """

    saved_roles = ("actor",)
    #: what a subclass adds to the configuration
    recipe: ClassVar[Recipe] = Recipe("SFT", schema=schema.SFTConfig)
    dataset_class: ClassVar[type[SFTDataset]] = SFTDataset
    collate = staticmethod(collate_sft)

    def __init__(
        self,
        config: Settings = None,
        *,
        config_path: str | Path | None = None,
        overrides: Overrides = (),
        train_dataset: Any = None,
        val_dataset: Any = None,
        model: Any = None,
        tokenizer: Any = None,
        cluster: Cluster | None = None,
    ):
        setup_logging()
        run = prepare_run(
            config,
            config_path,
            overrides,
            recipe_of(type(self)),
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            model=model,
            tokenizer=tokenizer,
            cluster=cluster,
        )
        inputs = run.inputs = load_sft_inputs(run, tokenizer, self.dataset_class, self.collate)
        run_checks(run, INPUTS)
        self.train_dataset, self.val_dataset = inputs.train_dataset, inputs.val_dataset
        super().__init__(run, prompt_source(run.config.data, inputs))

    def worker_specs(self) -> dict[str, WorkerSpec]:
        """Role -> worker spec; all roles share their processes."""
        return {"actor": WorkerSpec(SFTWorker, {"config": self.config, "total_training_steps": self.total_steps})}

    def init_workers(self) -> None:
        trainer = self.config.trainer
        pool = ResourcePool("actor", (trainer.n_gpus_per_node,) * trainer.nnodes)
        imports = tuple(self.config.imports)
        specs = {role: replace(spec, imports=imports) for role, spec in self.worker_specs().items()}
        self.roles.update(self.cluster.start({"actor": [(role, pool) for role in specs]}, specs))

    def build_flow(self) -> DataFlow:
        def update(batch: DataProto) -> None:
            batch.meta_info["metrics"] = self.roles["actor"].update(batch)

        reads = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
        return DataFlow([Operator("rows", self.source, writes=reads), Operator("update", update, reads=reads)])

    def announce(self) -> None:
        logger.info("model: %s", self.config.model.path)
        logger.info("data: %s; steps: %d", self.source.describe("samples"), self.total_steps)
        logger.info("%s", self._first_row())

    def plan(self) -> str:
        trainer = self.config.trainer
        return (
            f"would train {counted(self.total_steps, 'step')} of {self.recipe.name} from {self.config.model.path} with "
            f"{self.world_size} process{'es' * (self.world_size > 1)}\n"
            f"  data:        {self.source.describe('samples')}\n"
            f"  checkpoints: {describe_saving(trainer)}, in {trainer.default_local_dir}\n{self._first_row()}"
        )

    def _first_row(self) -> str:
        """The first row with marks around its trained tokens."""
        dataset = self.train_dataset
        return f"first row: {dataset.describe(0)}" if isinstance(dataset, SFTDataset) else "rows of a custom dataset"

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        return {"train/tokens": float(batch.batch["response_mask"].sum())}

    def checkpoints_to_keep(self) -> dict[str, int | None]:
        return {"actor": self.config.trainer.max_ckpt_to_keep}

    def validate(self) -> dict[str, float]:
        """val/loss: mean negative log-likelihood of the response tokens of the validation data."""
        if self.val_dataset is None:
            return {}
        self.start()
        rows, total, count = len(self.val_dataset), 0.0, 0.0
        # decoded images of a training batch fit into memory; token ids of all rows do
        size = rows if getattr(self.val_dataset, "media", None) is None else self.config.data.train_batch_size
        for start in range(0, rows, size):
            batch = self.run.inputs.collate([self.val_dataset[i] for i in range(start, min(start + size, rows))])
            media = [name for name in ("multi_modal_inputs",) if name in batch]
            inputs = batch.select(["input_ids", "attention_mask", "position_ids", "responses"], media)
            log_probs = self.roles["actor"].compute_log_prob(inputs).batch["old_log_probs"]
            mask = batch.batch["response_mask"]
            total += float(masked_sum(log_probs, mask))
            count += float(mask.sum())
        return {"val/loss": -total / count}
