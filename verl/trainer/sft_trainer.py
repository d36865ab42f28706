"""Supervised fine-tuning on the same loop: python -m verl.trainer.sft_trainer key=value ...

rows -> update
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from verl.algorithms.masked import masked_mean
from verl.config import check_inputs, check_models, check_supported, load_config, schema, unsupported
from verl.data.files import PromptSource
from verl.data.sft_dataset import SFTDataset, collate_sft
from verl.data.tokenization import load_tokenizer
from verl.dataflow import DataFlow, Operator, Stateful
from verl.engines.loading import check_kernels
from verl.protocol import DataProto
from verl.single_controller import LocalWorkerGroup, WorkerSpec
from verl.tracking.tracking import check_trackers, setup_logging
from verl.trainer import setup
from verl.trainer.base import Trainer
from verl.trainer.command_line import command_line
from verl.trainer.early_checks import check_model_section
from verl.trainer.launch import run
from verl.trainer.model_limits import ModelLimits
from verl.utils.device import resolve_device
from verl.workers.sft import SFTWorker

logger = logging.getLogger("verl.trainer")


class _Rows(Stateful):
    """The source of training rows."""

    def __init__(self, source: PromptSource):
        self.source = source

    def __call__(self) -> DataProto:
        return self.source()

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)


class SFTTrainer(Trainer):
    """Imitation of the responses of a data set, in one process.

    config: an SFTConfig, or None to read config_path and overrides. Datasets and tokenizer may be given.
    """

    saved_roles = ("actor",)

    def __init__(
        self,
        config: schema.SFTConfig | None = None,
        *,
        config_path: str | Path | None = None,
        overrides: Sequence[str] = (),
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        tokenizer: Any = None,
    ):
        setup_logging()
        if config is None:
            check = check_inputs if train_dataset is None else check_models
            config = load_config(config_path, overrides, schema=schema.SFTConfig, extra_checks=[check, unsupported])
        check_supported(config)
        setup.import_extensions(config)
        check_trackers(config.trainer.logger)
        setup.check_one_host(config.trainer)
        setup.check_folders(config.trainer)
        # of the last process: fewer GPUs than processes are found out now
        device = resolve_device(config.trainer.device, config.trainer.n_gpus_per_node - 1)
        self.on_gpu = device.type == "cuda"
        check_kernels(config.model, device)
        check_model_section(config.model, "causal_lm")
        dataset = setup.dataset_class(config, SFTDataset)
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.model)
        data = config.data
        self.collate: Callable[[list], DataProto] = lambda items: collate_sft(items, tokenizer.pad_token_id)
        self.train_dataset = (
            train_dataset
            if train_dataset is not None
            else dataset(data.train_files, tokenizer, data.model_dump() | {"max_samples": data.train_max_samples})
        )
        self.val_dataset = val_dataset
        if val_dataset is None and data.val_files:
            self.val_dataset = dataset(
                data.val_files, tokenizer, data.model_dump() | {"max_samples": data.val_max_samples}
            )
        setup.check_validation(config.trainer, self.val_dataset)
        if isinstance(self.train_dataset, SFTDataset):
            limits = ModelLimits.of(config.model)
            limits.check_vocabulary(tokenizer, self.train_dataset.largest_token_id)
            limits.check_rows(self.train_dataset.longest_row, "data.max_length")
        source = PromptSource(
            self.train_dataset, data.train_batch_size, seed=data.seed, shuffle=data.shuffle, collate=self.collate
        )
        super().__init__(config, source, tokenizer)

    def init_workers(self) -> None:
        config = self.config
        spec = WorkerSpec(SFTWorker, {"config": config, "total_training_steps": self.total_steps})
        ranks = config.trainer.n_gpus_per_node
        devices = range(ranks) if self.on_gpu and ranks > 1 else None
        self.roles["actor"] = LocalWorkerGroup(spec, ranks, name="actor", devices=devices)

    def build_flow(self) -> DataFlow:
        def update(batch: DataProto) -> None:
            batch.meta_info["metrics"] = self.roles["actor"].update(batch)

        reads = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
        return DataFlow([Operator("rows", _Rows(self.source), writes=reads), Operator("update", update, reads=reads)])

    def announce(self) -> None:
        logger.info("model: %s", self.config.model.path)
        logger.info("data: %s; steps: %d", self.source.describe(), self.total_steps)

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        return {"train/tokens": float(batch.batch["response_mask"].sum())}

    def checkpoints_to_keep(self) -> dict[str, int | None]:
        return {"actor": self.config.trainer.max_ckpt_to_keep}

    def validate(self) -> dict[str, float]:
        """val/loss: mean negative log-likelihood of the validation rows' response tokens."""
        if self.val_dataset is None:
            return {}
        batch = self.collate([self.val_dataset[i] for i in range(len(self.val_dataset))])
        asked = batch.select(["input_ids", "attention_mask", "position_ids", "responses"], [])
        log_probs = self.roles["actor"].compute_log_prob(asked).batch["old_log_probs"]
        return {"val/loss": -masked_mean(log_probs, batch.batch["response_mask"]).item()}


HELP = """usage: python -m verl.trainer.sft_trainer [--config FILE.yaml] key=value ...

  python -m verl.trainer.sft_trainer \\
      data.train_files=train.parquet data.prompt_key=question data.response_key=answer data.train_batch_size=64 \\
      model.path=/path/to/model optim.lr=1e-5 trainer.total_epochs=1 trainer.save_freq=100

  --config FILE.yaml   settings from a file; keys on the command line win
  --print-config       show the settings that would be used, and stop
  --help               this text; all keys: python -m verl.cli.config --of sft
"""


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""

    def start(path: str | None, overrides: list[str]) -> int:
        return run(lambda: SFTTrainer(config_path=path, overrides=overrides))

    return command_line(arguments, HELP, lambda *given: load_config(*given, schema=schema.SFTConfig), start)


if __name__ == "__main__":
    sys.exit(main())
