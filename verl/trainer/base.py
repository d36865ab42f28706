"""Trainer: the one training loop. A trainer is a flow, the workers it runs on, and the bookkeeping around them.

Everything that a user can get wrong is checked before a model is loaded: the configuration, the data, the tokenizer, the
reward function, the flow.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.presets import PRESETS
from verl.config import tree
from verl.config.available import check_available
from verl.config.load import batch_words, dump_config, load_config, to_flat_dict
from verl.data.files import PromptSource
from verl.data.rlhf_dataset import collate_prompts
from verl.dataflow import HOLD, DataFlow, Pipeline
from verl.protocol import DataProto
from verl.rewards import RewardManager
from verl.single_controller import WorkerGroup
from verl.trainer import setup
from verl.trainer.metrics import data_metrics, numeric_columns, timing_metrics, validation_metrics
from verl.trainer.ppo_flow import Prompts, build_ppo_flow, build_validation_flow
from verl.utils.checkpoint_store import CheckpointStore
from verl.utils.rng import rng_state, seed_everything, set_rng_state
from verl.utils.tracking import Tracking

logger = logging.getLogger("verl.trainer")


@dataclass(frozen=True)
class StepReport:
    """What a callback of `Trainer.on_step` learns after each step. metrics holds timing_s/* among the rest."""

    step: int
    total_steps: int
    metrics: dict[str, float]
    timings: dict[str, float]
    batch: DataProto


class Trainer(ABC):
    """Owns fit, validate, save, load and build_flow. Subclasses say in `init_workers` who executes.

    config: a Config, or None to read config_path and overrides ("key=value"). Datasets, reward manager and tokenizer
    may be given; otherwise they are made from the configuration.
    """

    def __init__(
        self,
        config: tree.Config | None = None,
        *,
        config_path: str | Path | None = None,
        overrides: Sequence[str] = (),
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        reward_manager: RewardManager | None = None,
        tokenizer: Any = None,
    ):
        if config is None:
            base = setup.config_of_datasets(train_dataset, val_dataset)
            config = load_config(config_path, overrides, base=base, presets=PRESETS)
        self.config = config
        check_available(config)
        setup.import_extensions(config)
        setup.check_group_size(config, get_adv_estimator_fn(config.algorithm.adv_estimator))
        self.tokenizer = tokenizer if tokenizer is not None else setup.load_tokenizer(config, train_dataset)
        self.train_dataset = train_dataset if train_dataset is not None else setup.load_dataset(config, self.tokenizer)
        self.val_dataset = val_dataset if val_dataset is not None else setup.load_val_dataset(config, self.tokenizer)
        self.reward_manager = reward_manager or setup.load_rewards(config, self.tokenizer)
        self.val_reward_manager = reward_manager or setup.load_rewards(config, self.tokenizer, validation=True)
        data = config.data
        self.source = PromptSource(
            self.train_dataset,
            data.train_batch_size,
            seed=data.seed if data.seed is not None else config.trainer.seed,
            shuffle=data.shuffle,
            collate=collate_prompts,
        )
        self.total_steps = config.trainer.total_training_steps or (
            self.source.steps_per_epoch * config.trainer.total_epochs
        )
        self.global_step = 0
        self.roles: dict[str, WorkerGroup] = {}
        self.on_step: list[Callable[[StepReport], None]] = []
        self.pipeline: Pipeline = self.build_flow().compile()
        self.validation = build_validation_flow(
            self.roles, self.val_reward_manager, config.actor_rollout_ref.rollout.val_kwargs.n
        ).compile(inputs=("prompt_ids", "uid", "data_source", "reward_model"))
        self.checkpoints = CheckpointStore(Path(config.trainer.default_local_dir), keep=None)

    # ---- what a subclass or a user changes ----------------------------------------------------------------------

    @abstractmethod
    def init_workers(self) -> None:
        """Fill `self.roles` with the worker groups of the roles that the flow needs."""

    def build_flow(self) -> DataFlow:
        """The training flow. Override it, and edit what super() gives, to change the algorithm."""
        return build_ppo_flow(
            self.config, Prompts(self.source, lambda: self.global_step), self.roles, self.reward_manager
        )

    # ---- the loop -----------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the end, from the last checkpoint if there is one. Returns the last metrics, validation's included."""
        trainer = self.config.trainer
        seed_everything(trainer.seed)
        setup.announce(self.config, self.source, self.total_steps, self.val_dataset)
        self.init_workers()
        self.load()
        metrics: dict[str, float] = {}
        with self._tracking() as tracking:
            if trainer.val_before_train or trainer.val_only:
                metrics = self._validate_and_log(tracking)
            if trainer.val_only:
                return metrics
            if self.global_step >= self.total_steps:
                logger.warning(
                    "nothing to train: the checkpoint is of step %d, the run ends at step %d; raise "
                    "trainer.total_training_steps or trainer.total_epochs to go on",
                    self.global_step,
                    self.total_steps,
                )
            while self.global_step < self.total_steps:
                metrics |= self.step(tracking)
        self.shutdown()
        return metrics

    def step(self, tracking: Tracking) -> dict[str, float]:
        """One training step: the flow until a batch comes out of it, then log, validate and save when it is time."""
        trainer = self.config.trainer
        self.global_step += 1
        timings: dict[str, float] = {}
        batch: Any = HOLD
        while batch is HOLD:
            batch = self.pipeline.run()
            for name, seconds in self.pipeline.timings.items():
                timings[name] = timings.get(name, 0.0) + seconds
        metrics = dict(batch.meta_info["metrics"]) | data_metrics(batch)
        metrics |= timing_metrics(timings, int(batch.batch["attention_mask"].sum()), self.world_size)
        metrics |= {
            "training/global_step": self.global_step,
            "training/epoch": self.source.epoch,
        }
        last = self.global_step == self.total_steps
        if trainer.rollout_data_dir:
            setup.dump_generations(trainer.rollout_data_dir, self.global_step, batch, self.tokenizer)
        tracking.log(metrics, self.global_step)
        if trainer.test_freq > 0 and (last or self.global_step % trainer.test_freq == 0):
            metrics |= self._validate_and_log(tracking)
        if trainer.save_freq > 0 and (last or self.global_step % trainer.save_freq == 0):
            self.save()
        report = StepReport(self.global_step, self.total_steps, metrics, timings, batch)
        for callback in self.on_step:
            callback(report)
        return metrics

    @property
    def world_size(self) -> int:
        return self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node

    def shutdown(self) -> None:
        """End the workers."""
        for group in set(self.roles.values()):
            group.shutdown()

    # ---- validation ---------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Answers to every validation prompt, scored: val-core/<source>/acc/mean@N and its relatives."""
        return self._validate()[0]

    def _validate(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        size = self.config.data.val_batch_size or len(self.val_dataset)
        pieces: list[DataProto] = []
        texts: list[dict[str, Any]] = []
        for start in range(0, len(self.val_dataset), size):
            rows = [self.val_dataset[i] for i in range(start, min(start + size, len(self.val_dataset)))]
            prompts = collate_prompts(rows).replace(uid=[f"val:{start + i}" for i in range(len(rows))])
            prompts.meta_info["global_step"] = self.global_step
            scored = self.validation.run(prompts)
            texts += setup.generations(scored, self.tokenizer)
            pieces.append(scored)
        variables = [numeric_columns(piece) for piece in pieces]
        joined = {name: torch.cat([torch.from_numpy(v[name]) for v in variables]).numpy() for name in variables[0]}
        sources, uids = (setup.joined(pieces, name) for name in ("data_source", "uid"))
        return validation_metrics(sources, uids, joined, setup.predictions(pieces)), texts

    def _validate_and_log(self, tracking: Tracking) -> dict[str, float]:
        if self.val_dataset is None:
            return {}
        start = time.perf_counter()
        metrics, texts = self._validate()
        metrics["timing_s/testing"] = time.perf_counter() - start
        trainer = self.config.trainer
        if trainer.validation_data_dir:
            setup.write_jsonl(Path(trainer.validation_data_dir) / f"{self.global_step}.jsonl", texts)
        if trainer.log_val_generations:
            tracking.log_samples("val/generations", texts[: trainer.log_val_generations], self.global_step)
        tracking.log(metrics, self.global_step)
        return metrics

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write `global_step_N`: the roles' weights and optimizers, the flow's state and every random state."""
        start = time.perf_counter()
        trainer = self.config.trainer
        with self.checkpoints.writing(self.global_step) as folder:
            self.roles["actor"].save_checkpoint(folder / "actor")
            self.tokenizer.save_pretrained(folder / "actor" / "huggingface")
            if "critic" in self.roles:
                self.roles["critic"].save_checkpoint(folder / "critic")
            state = {"global_step": self.global_step, "flow": self.pipeline.state_dict(), "rng": rng_state()}
            torch.save(state | {"config": to_flat_dict(self.config)}, folder / "trainer.pt")
            (folder / "config.yaml").write_text(dump_config(self.config))
        for part, keep in (("actor", trainer.max_actor_ckpt_to_keep), ("critic", trainer.max_critic_ckpt_to_keep)):
            if keep is not None:
                self.checkpoints.prune_part(part, keep)
        path = self.checkpoints.path(self.global_step)
        logger.info("[save] %.2fs %s", time.perf_counter() - start, path)
        return path

    def load(self) -> None:
        """Go on from the last complete checkpoint, or from trainer.resume_from_path; from the beginning if there is none."""
        trainer = self.config.trainer
        folder = {
            "disable": lambda: None,
            "auto": self.checkpoints.latest,
            "resume_path": lambda: self.checkpoints.verify(Path(trainer.resume_from_path)),
        }[trainer.resume_mode]()
        if folder is None:
            return
        state = torch.load(folder / "trainer.pt", weights_only=False)
        setup.report_changed_settings(state["config"], to_flat_dict(self.config))
        self.roles["actor"].load_checkpoint(folder / "actor")
        if "critic" in self.roles:
            self.roles["critic"].load_checkpoint(folder / "critic")
        self.pipeline.load_state_dict(state["flow"])
        set_rng_state(state["rng"])
        self.global_step = state["global_step"]
        logger.info("resumed from %s: step %d of %d", folder, self.global_step, self.total_steps)

    def _tracking(self) -> Tracking:
        trainer = self.config.trainer
        return Tracking(
            trainer.logger,
            trainer.project_name,
            trainer.experiment_name,
            config=to_flat_dict(self.config),
            default_local_dir=trainer.default_local_dir,
            resume_step=self.global_step,
        )
