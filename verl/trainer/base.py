"""Trainer: the one training loop. A trainer is a flow, the cluster it runs on, and the bookkeeping around them.

Everything that a user can get wrong is checked in the constructor, before a model is loaded (`preflight`).
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from verl.checkpoints.store import CheckpointStore
from verl.config.fields import Schema
from verl.data.order import PromptSource
from verl.dataflow import HOLD, DataFlow, Pipeline
from verl.protocol import DataProto
from verl.single_controller import WorkerGroup
from verl.single_controller.cluster import StartedRoles
from verl.tracking.trackers import Rows
from verl.trainer.checks.preflight import FLOW, Run, run_checks
from verl.trainer.guards.bad_steps import StepGuard, roll_back
from verl.trainer.guards.early_stopping import NoMetricError, ValidationWatch
from verl.trainer.guards.interruption import Interruption, Stopped, UnfinishedStep
from verl.trainer.guards.operator_watch import OperatorWatch
from verl.trainer.guards.quarantine import apply_quarantine, quarantine
from verl.trainer.guards.restarts import Restarts
from verl.trainer.output.metrics import timing_metrics
from verl.trainer.output.run_log import RunLog, warn_nothing_to_train
from verl.trainer.output.step_report import StepReport
from verl.trainer.state.checkpointing import Checkpointer
from verl.utils.device import frozen_heap, process_rss
from verl.utils.lock import lock_folder
from verl.utils.rng import rng_state, seed_everything, set_rng_state
from verl.utils.threads import warn_if_oversubscribed

logger = logging.getLogger("verl.trainer")


class Trainer(ABC):
    """Owns fit, step, save and load; a subclass defines the flow, its workers, and how it is validated.

    `fit`, `step` and `validate` start the workers at their first use. In this process, the model stays loaded until the
    trainer is deleted. Workers in other processes end with the `fit` that started them, with `shutdown`, or with the
    block of `with trainer:`.

    Args:
        run: settings, cluster and inputs, with all checks passed that need no flow.
        source: the batches of training prompts.

    Attributes:
        total_steps: number of the last step.
        global_step: number of completed steps.
        roles: role -> worker group, filled by `init_workers`.
        batch: the batch of the last step; None before the first one.
        on_step: functions called with a StepReport after each step.
        watch: the best validation so far, for trainer.save_best and trainer.early_stopping.
        interruption: whether SIGINT or SIGTERM was received.
        guard: counts bad steps.
        restarts: counts restarts of this `fit`.
        ready: whether workers are started and the checkpoint is loaded; later errors are not setup errors.
    """

    #: roles whose state is saved in a checkpoint, each into the folder of its name
    saved_roles: tuple[str, ...] = ()
    #: whether the seconds of each operator are logged, unless trainer.log_operators says so
    logs_operators: ClassVar[bool] = False
    #: operators that limit their waits themselves
    unwatched: frozenset[str] = frozenset()
    #: the validation data; None: no validation
    val_dataset: Any = None

    def __init__(self, run: Run, source: PromptSource):
        self.run = run
        self.config: Schema = run.config
        self.cluster = run.cluster
        self.source = source
        self.tokenizer = run.inputs.tokenizer
        trainer = self.config.trainer
        if trainer.device != "cuda":
            warn_if_oversubscribed()
        self.total_steps: int = trainer.total_training_steps or source.steps_per_epoch * trainer.total_epochs
        self.global_step = 0
        self.ready = False
        self.watch = ValidationWatch(trainer)
        self.interruption = Interruption()
        self.roles: dict[str, WorkerGroup] = StartedRoles()
        self.batch: DataProto | None = None
        self._started = False
        self._failed_step: int | None = None  # the last step, if it raised
        self.on_step: list[Callable[[StepReport], None]] = []
        self.guard = StepGuard(self)
        self._operator_watch = OperatorWatch(self)
        self.restarts = Restarts(self)
        flow = self._checked_flow("build_flow", self.build_flow())
        self.pipeline: Pipeline = self._checked_flow("finish_flow", self.finish_flow(flow)).compile()
        self.pipeline.log_level = self.operator_level
        run.columns = {column for operator in self.pipeline.operators for column in operator.writes}
        run_checks(run, FLOW)
        self.folder = run.working_dir / trainer.default_local_dir
        apply_quarantine(self)
        self.checkpoints = CheckpointStore(self.folder, keep=None)
        self.checkpointer = Checkpointer(
            self.checkpoints,
            self.config,
            saved_roles=self.saved_roles,
            roles=self.roles,
            pipeline=self.pipeline,
            tokenizer=self.tokenizer,
            model=run.inputs.model,
            keep=self.checkpoints_to_keep,
            watch=self.watch,
            train_dataset=run.inputs.train_dataset,
            working_dir=run.working_dir,
            reward=run.own_reward,
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

    def pipelines(self) -> Sequence[Pipeline]:
        """What runs in the thread of `fit`."""
        return (self.pipeline,)

    def running_operators(self) -> Mapping[str, float]:
        """Operators that are running -> start by `time.perf_counter`."""
        return {p.label + name: start for p in self.pipelines() for name, start in dict(p.running_since).items()}

    def draw_samples(self, batch: DataProto, count: int) -> Rows:
        """Return `count` samples of a finished batch, drawn at random, with input, output and score."""
        return ()

    def announce(self) -> None:
        """Log what is going to run."""
        logger.info("%s", self.plan().replace("would train", "training", 1))

    def before_first_step(self) -> None:  # noqa: B027 (optional hook)
        """Called after `init_workers` and `load`, before the first step or validation."""

    def after_restore(self) -> None:  # noqa: B027 (optional hook)
        """Called after running workers have loaded a checkpoint again, and before the step after a failed one."""

    def checkpoints_to_keep(self) -> dict[str, int | None]:
        """Role -> how many of its newest checkpoints are kept; None keeps all."""
        return dict.fromkeys(self.saved_roles)

    @property
    def operator_level(self) -> int:
        """Log level of the lines `[gen] 1.24s`."""
        chosen = self.config.trainer.log_operators
        return logging.INFO if (self.logs_operators if chosen is None else chosen) else logging.DEBUG

    @property
    def world_size(self) -> int:
        return self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers, resume from the newest checkpoint if there is one, and push the weights to the rollout.

        Does nothing if this is done. `fit`, `step`, `validate` and `generate` call it.
        """
        if self._started:
            return
        self._failed_step = None
        self.checkpointer.start_of_run(self.global_step)
        if self.roles:  # a custom loop has called `init_workers`
            self.before_first_step()
        else:
            seed_everything(self.config.trainer.seed)
            self.announce()
            try:
                self.init_workers()
                self.load()
                self.before_first_step()
            except BaseException:
                self.shutdown()
                raise
        self._started = self.ready = True

    def fit(self, steps: int | None = None) -> dict[str, float]:
        """Train to the last step, from the newest checkpoint if there is one. A further `fit` continues.

        Args:
            steps: number of steps from the current one, instead of all to the last step of the configuration.

        Returns:
            The metrics of the last step.

        Raises:
            InUseError: another run uses trainer.default_local_dir.
            Stopped: SIGINT or SIGTERM. The step in flight is finished or undone, and saved (docs/checkpoints.md).
        """
        self.check_steps(steps)
        was_started, self._steps_to_add = self._started, steps
        self.restarts, self.interruption = Restarts(self), Interruption()
        with closing(self.source), lock_folder(self.checkpoints.root):
            metrics = self.restarts.run(lambda: self._attempt(was_started))
            if not was_started and not self.can_stay_loaded:
                self.shutdown()
        return metrics

    def _attempt(self, was_started: bool) -> dict[str, float]:
        """Train to the last step. After an error, the workers have ended."""
        try:
            with RunLog(self) as log:
                self.start()
                if self._steps_to_add is not None:  # not again after a restart
                    self.total_steps, self._steps_to_add = self.global_step + self._steps_to_add, None
                elif was_started and self.global_step >= self.total_steps:
                    logger.warning("nothing to train: the run ended at step %d; see fit(steps)", self.global_step)
                return self._train(log)
        except BaseException as error:
            return self._train_again(error)

    def _train_again(self, error: BaseException) -> dict[str, float]:
        """After an error: roll back and train to the end if it allows that, otherwise end the workers and raise it."""
        try:
            quarantine(self, error)
            if not roll_back(self, error):
                raise error
            with RunLog(self) as log:
                return self._train(log)
        except BaseException as last:
            self.checkpointer.finish_pending_save(last)
            self.shutdown()
            raise

    def _train(self, log: RunLog) -> dict[str, float]:
        """The loop of `fit`: steps with logging, validation and saving."""
        trainer = self.config.trainer
        metrics: dict[str, float] = {}
        with frozen_heap(), log.steps(), self._operator_watch:  # what exists now lives to the end
            if trainer.val_only or (trainer.val_before_train and self.global_step == 0):
                metrics = self._validate(log)
            elif self.watch.skipped:
                metrics = self._skipped_validation(log)
            with Interruption(self._position) as self.interruption:
                while not (trainer.val_only or self.end_reason or self.interruption.requested):
                    with suppress(UnfinishedStep):
                        metrics |= self._logged_step(log)
                if self.interruption.requested and self.global_step > 0:  # received after a step was saved
                    self._save_if_due()
                self.checkpointer.wait()
            self._report_end()
        return metrics

    @property
    def can_stay_loaded(self) -> bool:
        """Whether the workers stay after the `fit` that has started them: none runs in another process."""
        return all(group.processes is None for group in self.roles.values())

    def check_steps(self, steps: int | None) -> None:
        """Raise ValueError for a number of steps that `fit` cannot train."""
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(f"fit(steps={steps!r}): expected the number of steps to train, int >= 1")

    def __enter__(self) -> Self:
        """Start the workers and keep them until the block ends."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def step(self) -> StepReport:
        """Train one step: run the flow until it returns a batch. The first call starts the workers.

        `fit` calls it, and then logs, validates and saves. Functions in `on_step` are called by `fit` only. A step that
        raises does not count, and the next one draws its prompts again; updates of weights that it has made remain.

        Returns:
            The metrics, a mapping with the attributes step, timings and batch.
        """
        self.start()
        self.checkpointer.poll()
        if self._failed_step is not None:
            self.after_restore()
        position, total, self._failed_step = self.flow_state(), self.total_steps, None
        self.global_step += 1
        self.total_steps = max(total, self.global_step)
        try:
            return self._run_flow()
        except BaseException as error:
            self._failed_step = None if isinstance(error, UnfinishedStep) else self.global_step
            self.global_step, self.total_steps = self.global_step - 1, total
            self.restore_flow(position)
            raise

    def flow_state(self) -> Any:
        """The state of the flow before a step, for `restore_flow`."""
        return self.pipeline.state_dict(), rng_state()

    def restore_flow(self, state: Any) -> None:
        """Undo what a failed step has changed in the flow."""
        self.pipeline.load_state_dict(state[0])
        set_rng_state(state[1])

    def _run_flow(self) -> StepReport:
        seconds, batch, timings = 0.0, HOLD, dict[str, float]()
        while batch is HOLD:
            if timings:
                self.interruption.end_unfinished(self.global_step)
            batch = self.pipeline.run()
            seconds += self.pipeline.seconds
            timings |= {name: timings.get(name, 0.0) + took for name, took in self.pipeline.timings.items()}
        metrics = dict(batch.meta_info["metrics"]) | self.step_metrics(batch)
        metrics |= timing_metrics(timings, seconds, int(batch.batch["attention_mask"].sum()), self.world_size)
        metrics |= {"training/global_step": self.global_step, "training/epoch": self.source.epoch}
        metrics |= self.restarts.metrics() | {"perf/cpu_memory_used_gb": process_rss() / 2**30}
        self.batch = batch
        return StepReport(self.global_step, self.total_steps, metrics, timings, batch)

    def _logged_step(self, log: RunLog) -> dict[str, float]:
        """One training step; then log, validate and save if due."""
        trainer, report = self.config.trainer, self.step()
        metrics = report.metrics
        log.step(report)
        self.guard.check(report)
        self.watch.improved = False
        is_last = trainer.test_freq not in (-1, 0) and self.global_step == self.total_steps
        if self._is_due(trainer.test_freq) or is_last:
            # a validation can take longer than the time between SIGTERM and SIGKILL
            self.watch.skipped = self.interruption.requested is not None
            if not self.watch.skipped:
                metrics |= self._validate(log)
        self._save_if_due()
        for callback in self.on_step:
            callback(report)
        return metrics

    def _save_if_due(self) -> None:
        trainer = self.config.trainer
        ends = self.end_reason is not None or self.interruption.requested is not None
        is_due = self._is_due(trainer.save_freq) or (ends and trainer.save_at_end) or self.guard.owes_save
        wanted = (is_due or self.watch.improved) and self.checkpointer.saved_step != self.global_step
        if wanted and not self.guard.defers_save():
            self.checkpointer.save(self.global_step, is_due)

    def _is_due(self, freq: int | str) -> bool:
        """Whether an action with this frequency, such as `trainer.save_freq`, is due after this step."""
        if freq == "after_each_epoch":
            freq = self.source.steps_per_epoch
        return isinstance(freq, int) and freq > 0 and self.global_step % freq == 0

    def _validate(self, log: RunLog) -> dict[str, float]:
        start = time.perf_counter()
        metrics = self.validate()
        if metrics:
            metrics["timing_s/testing"] = time.perf_counter() - start
            log.validation(metrics)
            logger.log(self.operator_level, "[validate] %.2fs", metrics["timing_s/testing"])
        if self.global_step == 0 or self.config.trainer.val_only:
            self.watch.check(metrics)
        elif not self.guard.is_bad:
            self._observe(metrics)
        return metrics

    def _observe(self, metrics: Mapping[str, float]) -> None:
        try:
            self.watch.observe(self.global_step, metrics)
        except NoMetricError:  # of a misspelt setting: the trained steps must not be lost
            if self.config.trainer.save_at_end:
                self.save()
                self.checkpointer.wait()
            raise

    def _skipped_validation(self, log: RunLog) -> dict[str, float]:
        """The validation of the checkpoint's step, which was due when the run was interrupted."""
        metrics = self._validate(log)
        if self.watch.improved:
            self.checkpointer.save(self.global_step, is_due=self._is_due(self.config.trainer.save_freq))
        return metrics

    def shutdown(self) -> None:
        """End the workers. The weights of steps after the last checkpoint end with them."""
        for group in set(self.roles.values()):
            group.shutdown()
        self.cluster.shutdown()
        self.source.close()
        self.roles.clear()
        self._started = False

    @property
    def end_reason(self) -> str | None:
        """Why the run has ended; None while there are further steps."""
        if self.global_step >= self.total_steps:
            return f"all {self.total_steps} steps are done"
        return self.watch.reason

    def _report_end(self) -> None:
        """Log why a run ended early. Raises Stopped after SIGINT or SIGTERM."""
        if self.watch.reason is not None:
            logger.info("early stopping at step %d of %d: %s", self.global_step, self.total_steps, self.watch.reason)
        if self.interruption.requested is not None and self.end_reason is None:
            raise Stopped(self.interruption.requested, finished=True)

    def _position(self) -> str:
        return f"step {self.global_step} of {self.total_steps}{' and saving it' * self.config.trainer.save_at_end}"

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
            if self.global_step > 0:
                raise ValueError(
                    f"the trainer is at step {self.global_step}, but there is no checkpoint to resume from, and the "
                    "weights of these steps ended with the workers of the last fit(): set trainer.save_freq and "
                    "trainer.resume_mode=auto to continue in another fit(), or make a new trainer"
                )
            return
        self.global_step = step
        if not (self.config.trainer.val_only or self.watch.skipped or self.end_reason is None):
            warn_nothing_to_train(self)

    def rewind(self) -> None:
        """Return to the last checkpoint of this run, or to the state before its first step if there is none. Workers
        that are running load it now, others when they start. Raises ValueError if there is neither."""
        if not (self._started and self.checkpointer.saved_path):
            self.checkpointer.check_can_rewind()  # before the weights are lost
            self.shutdown()
        self.guard.reset()
        self.global_step = self.checkpointer.rewind(self._started)
        if self._started:
            self.after_restore()

    def __repr__(self) -> str:
        flow = " -> ".join(op.name for op in self.pipeline.operators)
        state = "workers started" if self._started else "workers not started"
        return f"{type(self).__name__}(step {self.global_step} of {self.total_steps}, {state}; flow: {flow})"

    @property
    def attempted_step(self) -> int:
        """The step that failed, if the last one did; otherwise `global_step`."""
        return self.global_step if self._failed_step is None else self._failed_step

    def progress_summary(self) -> str:
        """Message for a run that ends early: its step, and the checkpoint from which it resumes."""
        step = self.attempted_step
        where = f"in step {step} of {max(step, self.total_steps)}" if step else "before the first step"
        return f"{where}; {self.checkpointer.how_to_resume()}"

    def passed_checks(self) -> Sequence[str]:
        """Names of the preflight checks that have passed."""
        return self.run.passed
