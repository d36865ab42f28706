"""PPOTrainer: policy optimisation. Subclasses differ in who executes it (`init_workers`) alone."""

import logging
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import Dataset

from verl.algorithms.presets import PRESETS
from verl.config import batch_summary, check_inputs, check_models, check_supported, load_config, schema, unsupported
from verl.data.files import PromptSource
from verl.data.rlhf_dataset import RLHFDataset, check_dataset, collate_prompts
from verl.data.tokenization import load_tokenizer
from verl.dataflow import CONTROLLER, DataFlow
from verl.protocol import DataProto
from verl.rewards import RewardManager
from verl.single_controller import WorkerSpec
from verl.tracking.tracking import setup_logging
from verl.trainer import setup
from verl.trainer.base import Trainer
from verl.trainer.dynamic_sampling import sample_dynamically
from verl.trainer.early_checks import check_early
from verl.trainer.launch import Recipe
from verl.trainer.metrics import data_metrics, numeric_columns, validation_metrics
from verl.trainer.ppo_flow import (
    Prompts,
    build_ppo_flow,
    build_validation_flow,
    needs_critic,
    spare_old_log_prob,
)
from verl.trainer.roles import placement_words, pools_of, worker_specs
from verl.trainer.rollout_correction import correct_rollout
from verl.trainer.samples import dump_generations, generations, write_jsonl
from verl.trainer.unused_settings import warn_of_unused_settings

logger = logging.getLogger("verl.trainer")


class PPOTrainer(Trainer):
    """Policy optimisation by the flow of `build_flow`.

    config: a Config, or None to read config_path and overrides ("key=value"). Datasets, reward manager and tokenizer
    may be given; otherwise they are made from the configuration.
    """

    saved_roles = ("actor", "critic")
    #: what a subclass adds to the configuration
    recipe: ClassVar[Recipe] = Recipe()

    def __init__(
        self,
        config: schema.Config | None = None,
        *,
        config_path: str | Path | None = None,
        overrides: Sequence[str] = (),
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        reward_manager: RewardManager | None = None,
        tokenizer: Any = None,
    ):
        setup_logging()
        if config is None:
            check = check_inputs if train_dataset is None else check_models
            base = setup.base_config(self.recipe, train_dataset, val_dataset)
            tree_of_keys, checks = self.recipe.tree, [check, unsupported]
            config = load_config(
                config_path, overrides, base=base, presets=PRESETS, schema=tree_of_keys, extra_checks=checks
            )
        check_supported(config)
        setup.import_extensions(config)
        check_early(config)
        self.prepare_executor(config)
        setup.warn_of_choice_in_parts(config)
        warn_of_unused_settings(config)
        if tokenizer is None and isinstance(train_dataset, RLHFDataset):
            tokenizer = train_dataset.tokenizer
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.actor_rollout_ref.model)
        self.reward_manager = reward_manager if reward_manager is not None else setup.load_rewards(config, tokenizer)
        self.train_dataset = train_dataset if train_dataset is not None else setup.load_dataset(config, tokenizer)
        self.val_dataset = val_dataset if val_dataset is not None else setup.load_val_dataset(config, tokenizer)
        check_dataset(self.train_dataset)
        if self.val_dataset is not None:
            check_dataset(self.val_dataset)
        setup.check_validation(config.trainer, self.val_dataset)
        self.vocab_size = setup.check_model_fits(config, tokenizer, self.train_dataset)
        with_model = config.reward.reward_model.enable
        figures = setup.try_rewards(self.reward_manager, self.train_dataset, tokenizer, with_model)
        source = PromptSource(
            self.train_dataset,
            config.data.train_batch_size,
            seed=config.data.seed,
            shuffle=config.data.shuffle,
            collate=collate_prompts,
        )
        self._said_tied = False
        super().__init__(config, source, tokenizer)
        written = {column for operator in self.pipeline.operators for column in operator.writes}
        setup.check_reward_names(config, figures, written)
        if config.trainer.overlap:
            self.pipeline.place_of = self.processes_of
        self.specs = self.worker_specs()
        self.pools = pools_of(config, list(self.specs))
        self.validation = build_validation_flow(config, self.roles, self.reward_manager).compile(
            inputs=("prompt_ids", "uid", "data_source", "reward_model")
        )

    def prepare_executor(self, config: schema.Config) -> None:
        """Raise ValueError for what is asked of the executor in vain. By then nothing has been read but settings."""

    def build_flow(self) -> DataFlow:
        prompts = Prompts(self.source, lambda: self.global_step, self.vocab_size)
        flow = build_ppo_flow(self.config, prompts, self.roles, self.reward_manager)
        if self.config.algorithm.filter_groups.enable:
            sample_dynamically(flow, self.config, self.tokenizer.pad_token_id)
        return correct_rollout(flow, self.config)

    def finish_flow(self, flow: DataFlow) -> DataFlow:
        return spare_old_log_prob(flow, self.config)

    def worker_specs(self) -> dict[str, WorkerSpec]:
        """role -> its worker; a subclass with a role of its own adds it."""
        return worker_specs(
            self.config,
            total_steps=self.total_steps,
            tokenizer=self.tokenizer,
            stop_token_ids=setup.stop_token_ids(self.config.actor_rollout_ref.model.path, self.tokenizer),
        )

    def processes_of(self, on: str) -> Hashable | None:
        """The processes of a role, None for the controller's own."""
        return None if on == CONTROLLER else self.roles[on].processes

    def announce(self) -> None:
        rows = f"{len(self.val_dataset):,} rows" if self.val_dataset is not None else "none"
        logger.info("model: %s", self.config.actor_rollout_ref.model.path)
        method = self.recipe.name or self.config.algorithm.adv_estimator
        logger.info("algorithm: %s; steps: %d", method, self.total_steps)
        logger.info("batch: %s", batch_summary(self.config, critic=needs_critic(self.config)))
        logger.info("data: %s; validation: %s", self.source.describe(), rows)
        if self.world_size > 1:
            logger.info("placement: %s", placement_words(self.pools))
        if self.config.trainer.overlap and len(self.pools) == 1:
            logger.warning(
                "trainer.overlap=true: all roles share their processes, so at most the rewards are computed beside "
                "their work; `placement` parts them"
            )
        logger.info("flow: %s", " -> ".join(op.name for op in self.pipeline.operators))

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        folder = self.config.trainer.rollout_data_dir
        if folder:
            dump_generations(folder, self.global_step, batch, self.tokenizer)
        metrics = data_metrics(batch)
        gap = batch.meta_info["metrics"].get("rollout/logprob_gap_max", 0.0)
        if self.config.actor_rollout_ref.rollout.deterministic and gap != 0:
            logger.warning(
                "step %d: log-probs of sampling and of training differ by up to %g, which rollout.deterministic rules "
                "out: was rollout_log_probs changed in the flow? Else a library here rounds a row by its place",
                self.global_step,
                gap,
            )
        if metrics.get("reward/tied_groups") == 1.0 and not self._said_tied:
            self._said_tied = True
            logger.warning(
                "step %d: all answers to each prompt have the same score, so there is nothing to learn from comparing "
                "them; is the task too hard or too easy for this model, or the reward not what you mean?",
                self.global_step,
            )
        return metrics

    def validate(self) -> dict[str, float]:
        """Answers to every validation prompt, scored: val-core/<source>/acc/mean@N and its relatives."""
        if self.val_dataset is None:
            return {}
        logger.info("validating: %s prompts", f"{len(self.val_dataset):,}")
        scored, texts = [], []
        size = self.config.data.val_batch_size or len(self.val_dataset)
        for start in range(0, len(self.val_dataset), size):
            rows = range(start, min(start + size, len(self.val_dataset)))
            prompts = collate_prompts([self.val_dataset[i] for i in rows]).replace(uid=[f"val:{i}" for i in rows])
            prompts.meta_info["vocab_size"] = self.vocab_size
            scored.append(self.validation.run(prompts))
            texts += generations(scored[-1], self.tokenizer)
        variables = numeric_columns(scored)
        sources, uids = (setup.joined(scored, name) for name in ("data_source", "uid"))
        folder = self.config.trainer.validation_data_dir
        if folder:
            write_jsonl(Path(folder) / f"{self.global_step}.jsonl", texts)
        self.validation_samples = texts
        return validation_metrics(sources, uids, variables, setup.predictions(scored))

    def checkpoints_to_keep(self) -> dict[str, int | None]:
        trainer = self.config.trainer
        return {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep}
