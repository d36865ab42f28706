"""Offline training on preferences of a file, on the loop of SFT: policies here, reward models in `verl.recipe.rm`.

rows -> [ref] -> update
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from verl.algorithms.preference import PREFERENCE_LOSSES, PreferenceLoss
from verl.config import Problem
from verl.config.schema import DPOConfig, SFTConfig
from verl.dataflow import DataFlow, Operator
from verl.engines.base import Tensors
from verl.protocol import DataProto
from verl.recipe.dpo.dataset import PreferenceDataset, collate_preferences
from verl.recipe.dpo.worker import (
    PreferenceWorker,
    count_preferences,
    sequence_columns,
    split_mismatched,
    with_mismatched,
)
from verl.registry import did_you_mean
from verl.single_controller import WorkerSpec
from verl.trainer.checks.preflight import Recipe
from verl.trainer.ppo.operators import SEQUENCES
from verl.trainer.ppo.operators import sequence_columns as model_columns
from verl.trainer.sft import SFTTrainer
from verl.trainer.startup.inputs import Inputs

COLUMNS = ("prompts", *SEQUENCES, "response_mask", "label", "margin", "pair_weight")

#: keys of `data` of SFT that preferences do not have
_UNUSED = ("messages_key", "prompt_dict_keys", "response_dict_keys")


def check_data_settings(config: SFTConfig) -> Iterator[Problem]:
    """Settings of `data` that preferences do not have."""
    for key in _UNUSED:
        if config.data[key] is not None:
            fix = "use data.prompt_key, data.chosen_key, data.rejected_key, data.response_key and data.label_key"
            yield Problem(f"data.{key}", f"has no effect on preferences: {fix}")


def check_loss(config: Any) -> Iterator[Problem]:
    """A built-in loss has the settings; a custom one is checked once it is registered."""
    if config.dpo.loss not in PREFERENCE_LOSSES:
        if not config.imports:
            yield Problem("dpo.loss", did_you_mean(config.dpo.loss, PREFERENCE_LOSSES))
        return
    try:
        PreferenceLoss(config.dpo.loss, config.dpo.settings)
    except ValueError as error:
        yield Problem("dpo", str(error))


def check_settings(config: DPOConfig) -> Iterator[Problem]:
    """Settings that are invalid for offline DPO."""
    yield from check_data_settings(config)
    problems = [*check_loss(config)]
    yield from problems
    if not problems and not config.imports and loss_of(config).needs_kl and config.data.train_batch_size < 2:
        problem = "1, but the KL of kto is estimated from the responses of other rows of the batch: use 2 or more"
        yield Problem("data.train_batch_size", problem)


def check_form(loss: PreferenceLoss, inputs: Inputs) -> None:
    """The data has the form that the loss reads. Raises ValueError."""
    for dataset in (inputs.train_dataset, inputs.val_dataset):
        if not isinstance(dataset, PreferenceDataset | None):
            raise ValueError(f"preferences: expected a subclass of PreferenceDataset, found {type(dataset).__name__}")
        if dataset is not None and loss.is_paired and not dataset.is_paired:
            pair = f"{dataset.config.chosen_key!r} and {dataset.config.rejected_key!r}"
            raise ValueError(
                f"{dataset.rows.names}: responses with a label, but the loss {loss.name} reads pairs: use dpo.loss=kto "
                f"(verl dpo), or data with the columns {pair}"
            )


class PreferenceTrainer(SFTTrainer):
    """Base of trainers on preferences of a file. A subclass says which model learns which loss."""

    dataset_class = PreferenceDataset
    is_reward_model: ClassVar[bool] = False

    @property
    def loss(self) -> PreferenceLoss:
        """The loss that the configuration selects."""
        raise NotImplementedError

    @property
    def reference(self) -> str | None:
        """The role that computes the reference; a LoRA policy is its own."""
        if not self.loss.needs_reference:
            return None
        return "actor" if self.config.model.has_adapters else "ref"

    def collate(self, items: list[dict[str, Any]], pad_token_id: int) -> DataProto:
        return collate_preferences(items, pad_token_id, scores=self.is_reward_model)

    def worker_specs(self) -> dict[str, WorkerSpec]:
        settings = {
            "config": self.config,
            "loss": self.loss,
            "is_reward_model": self.is_reward_model,
            "total_training_steps": self.total_steps,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        specs = {"actor": WorkerSpec(PreferenceWorker, settings)}
        if self.reference == "ref":
            specs["ref"] = WorkerSpec(PreferenceWorker, {"config": self.config, "loss": None})
        return specs

    def build_flow(self) -> DataFlow:
        def update(batch: DataProto) -> None:
            batch.meta_info["metrics"] = self.roles["actor"].update(batch)

        flow = DataFlow([Operator("rows", self.source, writes=COLUMNS), Operator("update", update, reads=COLUMNS)])
        if self.loss.needs_kl:
            flow.insert_before("update", Operator("mismatched", with_mismatched, reads=COLUMNS))
        if self.reference is not None:
            flow.insert_before("update", Operator("ref", self.compute_ref, reads=COLUMNS, writes=("ref_log_prob",)))
        return flow

    def compute_ref(self, batch: DataProto) -> DataProto:
        """Column ref_log_prob."""
        return self.roles[self.reference].compute_ref_log_prob(model_columns(batch, ("response_mask",)))

    def validate(self) -> dict[str, float]:
        """val/loss, and the metrics of the loss, of the validation preferences."""
        if self.val_dataset is None:
            return {}
        self.start()
        rows, columns = len(self.val_dataset), []
        # decoded images of a training batch fit into memory; token ids of all rows do
        size = rows if self.val_dataset.media is None else self.config.data.train_batch_size
        for start in range(0, rows, size):
            items = [self.val_dataset[i] for i in range(start, min(start + size, rows))]
            batch = self.run.inputs.collate(items)
            if self.loss.needs_kl:
                batch = with_mismatched(batch)
            if self.reference is not None:
                batch = batch.union(self.compute_ref(batch))
            (values,) = self.roles["actor"].compute_outputs(model_columns(batch, ("response_mask",))).tensors.values()
            columns.append(sequence_columns(values, batch.tensors))
        joined = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
        return {f"val/{name}": value for name, value in self.evaluate(joined).items()}

    def evaluate(self, rows: Tensors) -> dict[str, float]:
        """The loss and its metrics of the columns of `PreferenceLoss`, (B,) each."""
        kl = 0.0
        if self.loss.needs_kl:
            rows, log_ratios = split_mismatched(rows)
            kl = max(log_ratios.mean().item(), 0.0)
        value, metrics = self.loss(rows, count_preferences(self.loss, rows), kl)
        means = {name: float(total) / float(count) for name, (total, count) in metrics.items() if count}
        return {"loss": value.item(), **means}


class OfflineDPOTrainer(PreferenceTrainer):
    """DPO, IPO, KTO, SimPO or ORPO on the preferences of a file, on one host. Arguments as for `SFTTrainer`.

    >>> OfflineDPOTrainer(overrides=["data.train_files=pairs.jsonl", "model.path=my-model", "dpo.loss=simpo"]).fit()
    """

    recipe = Recipe("DPO", None, DPOConfig, check_settings, lambda config, inputs: check_form(loss_of(config), inputs))

    @property
    def loss(self) -> PreferenceLoss:
        return loss_of(self.config)


def loss_of(config: Any) -> PreferenceLoss:
    """The loss of the section `dpo`. Raises ValueError if there is none of that name, or it lacks a setting."""
    return PreferenceLoss(config.dpo.loss, config.dpo.settings)
