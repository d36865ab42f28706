"""Trainer: the one training loop. A trainer is a flow, the cluster it runs on, and the bookkeeping around them.

Everything that a user can get wrong is checked in the constructor, before a model is loaded (`preflight`).
"""

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoints.store import CheckpointStore
from verl.config import to_flat_dict
from verl.config.fields import Schema, differences, redacted
from verl.data.files import PromptSource
from verl.dataflow import HOLD, DataFlow, Pipeline
from verl.protocol import DataProto
from verl.single_controller import WorkerGroup
from verl.tracking.run_record import RunRecord
from verl.tracking.trackers import Rows
from verl.tracking.tracking import Tracking
from verl.trainer.checkpointing import Checkpointer
from verl.trainer.metrics import timing_metrics
from verl.trainer.preflight import FLOW, Run, run_checks
from verl.trainer.recording import run_record
from verl.utils.device import process_rss
from verl.utils.lock import lock_folder
from verl.utils.rng import seed_everything

logger = logging.getLogger("verl.trainer")


@dataclass(frozen=True)
class StepReport:
    """What a callback in `Trainer.on_step` receives after each step. metrics includes timing_s/*."""

    step: int
    total_steps: int
    metrics: dict[str, float]
    timings: dict[str, float]
    batch: DataProto


class StartedRoles(dict[str, WorkerGroup]):
    """Role -> worker group. A missing role is an error with the fix."""

    def __missing__(self, role: str) -> WorkerGroup:
        started = f"roles with workers: {', '.join(self)}" if self else "call init_workers() first, or use fit()"
        raise RuntimeError(f"the role {role!r} has no workers: {started}")


class Trainer(ABC):
    """Owns fit, save and load; a subclass defines the flow, its workers, and how it is validated.

    Args:
        run: settings, cluster and inputs, with all checks passed that need no flow.
        source: the batches of training prompts.

    Attributes:
        total_steps: number of the last step.
        global_step: number of completed steps.
        roles: role -> worker group, filled by `init_workers`.
        on_step: functions called with a StepReport after each step.
        ready: whether workers are started and the checkpoint is loaded; later errors are not setup errors.
    """

    #: roles whose state is saved in a checkpoint, each into the folder of its name
    saved_roles: tuple[str, ...] = ()

    def __init__(self, run: Run, source: PromptSource):
        self.run = run
        self.config: Schema = run.config
        self.cluster = run.cluster
        self.source = source
        self.tokenizer = run.inputs.tokenizer
        trainer = self.config.trainer
        self.total_steps: int = trainer.total_training_steps or source.steps_per_epoch * trainer.total_epochs
        self.global_step = 0
        self.ready = False
        self.roles: dict[str, WorkerGroup] = StartedRoles()
        self.on_step: list[Callable[[StepReport], None]] = []
        self._skipped: dict[str, int] = {}  # metric of a role -> consecutive steps without a single update
        flow = self._checked_flow("build_flow", self.build_flow())
        self.pipeline: Pipeline = self._checked_flow("finish_flow", self.finish_flow(flow)).compile()
        run.columns = {column for operator in self.pipeline.operators for column in operator.writes}
        run_checks(run, FLOW)
        self.folder = run.working_dir / trainer.default_local_dir
        self.checkpoints = CheckpointStore(self.folder, keep=None)
        self.checkpointer = Checkpointer(
            self.checkpoints,
            self.config,
            saved_roles=self.saved_roles,
            roles=self.roles,
            pipeline=self.pipeline,
            tokenizer=self.tokenizer,
            keep=self.checkpoints_to_keep,
        )

    # ---- what a subclass defines ------------------------------------------------------------------------------------

    @abstractmethod
    def init_workers(self) -> None:
        """Fill `self.roles` with the worker groups that the flow needs. Models are loaded here, not before."""

    @abstractmethod
    def build_flow(self) -> DataFlow:
        """The training flow. To change the algorithm, override it and edit what super() returns."""

    def _checked_flow(self, method: str, flow: Any) -> DataFlow:
        """What a method returned. Raises ValueError if it is not a flow."""
        if not isinstance(flow, DataFlow):
            name = f"{type(self).__name__}.{method}"
            raise ValueError(f"{name} returned {flow!r}, expected a DataFlow: end it with `return flow`")
        return flow

    def finish_flow(self, flow: DataFlow) -> DataFlow:
        """The last edit of the flow, after `build_flow` and its overrides."""
        return flow

    @abstractmethod
    def plan(self) -> str:
        """Description of the run, in one paragraph."""

    @abstractmethod
    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        """Metrics of a finished batch, in addition to those of the operators."""

    def step_samples(self, batch: DataProto) -> Rows:
        """Return samples of a finished batch for the trackers: a table with equal keys in every row."""
        return ()

    def step_record(self, batch: DataProto) -> Mapping[str, Any]:
        """Return what `verl report` shows of a finished batch, as JSON; empty: nothing."""
        return {}

    def validation_samples(self) -> Rows:
        """Return samples of the last validation for the trackers."""
        return ()

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics of the current weights on the validation data; empty if there is none."""

    def announce(self) -> None:
        """Log what is going to run."""
        logger.info("%s", self.plan().replace("would train", "training", 1))

    def before_first_step(self) -> None:  # noqa: B027 (optional hook)
        """Called after `init_workers` and `load`, before the first step or validation."""

    def checkpoints_to_keep(self) -> dict[str, int | None]:
        """Role -> how many of its newest checkpoints are kept; None keeps all."""
        return dict.fromkeys(self.saved_roles)

    @property
    def world_size(self) -> int:
        return self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the last step, from the newest checkpoint if there is one.

        Returns:
            The metrics of the last step.

        Raises:
            InUseError: another run uses trainer.default_local_dir.
        """
        trainer = self.config.trainer
        recording = run_record(self.folder, self.config, self.total_steps, self.run.warnings)
        with lock_folder(self.checkpoints.root), recording as record:
            self.checkpointer.check_experiment()
            seed_everything(trainer.seed)
            self.announce()
            try:
                self.init_workers()
                self.load()
                self.before_first_step()
                record.resume(self.global_step)
                self.ready = True
                # what exists now lives to the end: exclude it from garbage collection in every step
                gc.collect()
                gc.freeze()
                metrics: dict[str, float] = {}
                with self._tracking() as tracking:
                    if trainer.val_only or (trainer.val_before_train and self.global_step == 0):
                        metrics = self._validate(tracking)
                    while self.global_step < self.total_steps and not trainer.val_only:
                        metrics |= self._logged_step(tracking, record)
                self.checkpointer.wait()
                return metrics
            except BaseException as error:
                self.checkpointer.finish_pending_save(error)
                raise
            finally:
                self.shutdown()

    def step(self) -> StepReport:
        """Run one training step: the flow, until it returns a batch. For a custom loop, after `init_workers`.

        `fit` calls it, and then logs, validates and saves. Functions in `on_step` are called by `fit` only.
        """
        self.checkpointer.poll()
        self.global_step += 1
        timings: dict[str, float] = {}
        seconds = 0.0
        batch: Any = HOLD
        while batch is HOLD:
            batch = self.pipeline.run()
            seconds += self.pipeline.seconds
            for name, took in self.pipeline.timings.items():
                timings[name] = timings.get(name, 0.0) + took
        metrics = dict(batch.meta_info["metrics"]) | self.step_metrics(batch)
        metrics |= timing_metrics(timings, seconds, int(batch.batch["attention_mask"].sum()), self.world_size)
        metrics |= {"training/global_step": self.global_step, "training/epoch": self.source.epoch}
        metrics["perf/cpu_memory_used_gb"] = process_rss() / 2**30
        return StepReport(self.global_step, self.total_steps, metrics, timings, batch)

    def _logged_step(self, tracking: Tracking, record: RunRecord) -> dict[str, float]:
        """One training step; then log, validate and save if due."""
        trainer, report = self.config.trainer, self.step()
        metrics = report.metrics
        tracking.log(metrics, self.global_step)
        tracking.log_samples("train/generations", self.step_samples(report.batch), self.global_step)
        record.add_step(self.global_step, lambda: self.step_record(report.batch), self.global_step == self.total_steps)
        self._check_skipped(metrics)
        if self._is_due(trainer.test_freq):
            metrics |= self._validate(tracking)
        if self._is_due(trainer.save_freq):
            if any(self._skipped.values()) and trainer.max_skipped_steps > 0 and self.global_step < self.total_steps:
                # a run that is about to end for skipped updates must resume from before them
                logger.warning("step %d is not saved: all its updates were skipped", self.global_step)
            else:
                self.save()
        for callback in self.on_step:
            callback(report)
        return metrics

    def _is_due(self, freq: int | str) -> bool:
        """Whether an action with this frequency, such as `trainer.save_freq`, is due after this step."""
        if freq not in (-1, 0) and self.global_step == self.total_steps:
            return True
        if freq == "after_each_epoch":
            freq = self.source.steps_per_epoch
        return isinstance(freq, int) and freq > 0 and self.global_step % freq == 0

    def _check_skipped(self, metrics: dict[str, float]) -> None:
        """End a run that can no longer update a role. Raises FloatingPointError."""
        limit = self.config.trainer.max_skipped_steps
        for name, share in metrics.items():
            if not name.endswith("grad_skipped"):
                continue
            self._skipped[name] = self._skipped.get(name, 0) + 1 if share == 1 else 0
            if 0 < limit <= self._skipped[name]:
                self.checkpointer.wait()
                raise FloatingPointError(
                    f"{name} was 1 for {limit} steps in a row: no gradient was finite, so nothing was learned. Look at "
                    "the metrics of the steps before (learning rate, KL, lengths). trainer.max_skipped_steps sets the "
                    f"limit (0: no limit); {self.checkpointer.newest()}"
                )

    def _validate(self, tracking: Tracking) -> dict[str, float]:
        start = time.perf_counter()
        metrics = self.validate()
        if metrics:
            metrics["timing_s/testing"] = time.perf_counter() - start
            tracking.log(metrics, self.global_step)
            tracking.log_samples("val/generations", self.validation_samples(), self.global_step)
            logger.info("[validate] %.2fs", metrics["timing_s/testing"])
        return metrics

    def _tracking(self) -> Tracking:
        trainer = self.config.trainer
        return Tracking(
            trainer.logger,
            trainer.project_name,
            trainer.experiment_name,
            config=redacted(to_flat_dict(self.config)),
            default_local_dir=self.folder,
            resume_step=self.global_step,
            changed=list(differences(self.config)),
        )

    def shutdown(self) -> None:
        """End the workers."""
        gc.unfreeze()
        for group in set(self.roles.values()):
            group.shutdown()
        self.cluster.shutdown()

    # ---- checkpoints and messages -----------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write the checkpoint `global_step_N` of the current step."""
        return self.checkpointer.save(self.global_step)

    def load(self) -> None:
        """Resume from the newest complete checkpoint, or from trainer.resume_from_path; otherwise do nothing.

        Raises:
            ValueError: this trainer has completed steps, but there is no checkpoint with their weights.
        """
        step = self.checkpointer.load()
        if step == 0:
            if 0 < self.global_step < self.total_steps:
                raise ValueError(
                    f"the trainer is at step {self.global_step}, but there is no checkpoint to resume from, and the "
                    "weights of these steps ended with the workers of the last fit(): set trainer.save_freq and "
                    "trainer.resume_mode=auto to continue in another fit(), or make a new trainer"
                )
            return
        self.global_step = step
        if step >= self.total_steps and not self.config.trainer.val_only:
            logger.warning(
                "nothing to train: the checkpoint is at step %d and the run ends at step %d. To continue, raise "
                "trainer.total_training_steps or trainer.total_epochs; to start a fresh run, set a new "
                "trainer.experiment_name or trainer.default_local_dir (now %s)",
                step,
                self.total_steps,
                self.checkpoints.root,
            )

    def progress_summary(self) -> str:
        """Message for a run that ends early: its step, and the checkpoint from which it resumes."""
        return f"in step {self.global_step} of {self.total_steps}; {self.checkpointer.how_to_resume()}"

    def passed_checks(self) -> Sequence[str]:
        """Names of the preflight checks that have passed."""
        return self.run.passed
