"""Trainer: the one training loop. A trainer is a flow, the cluster it runs on, and the bookkeeping around them.

Everything that a user can get wrong is checked in the constructor, before a model is loaded (`preflight`).
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar, Self

from verl.checkpoints.store import CheckpointStore
from verl.config.fields import Schema
from verl.data.order import PromptSource
from verl.dataflow import DataFlow, Pipeline
from verl.protocol import DataProto
from verl.single_controller import WorkerGroup
from verl.single_controller.cluster import StartedRoles
from verl.tracking.trackers import Rows
from verl.trainer.checks.preflight import FLOW, Run, run_checks
from verl.trainer.guards.base import RESTART, ROLL_BACK, SKIP, Guard, ask, decide, load_callbacks
from verl.trainer.guards.early_stopping import ValidationWatch
from verl.trainer.guards.interruption import Interruption, Stopped, UnfinishedStep
from verl.trainer.guards.mismatch import MismatchLimit
from verl.trainer.guards.operator_watch import OperatorWatch, ProfiledSteps
from verl.trainer.guards.restarts import BadSteps, Restarts, log_restart, settings_for_devices_left
from verl.trainer.output.metrics import timing_metrics
from verl.trainer.output.run_log import RunLog, warn_nothing_to_train
from verl.trainer.runner import FlowRunner
from verl.trainer.state.checkpointing import Checkpointer
from verl.trainer.view import RunView, StepReport
from verl.utils.device import frozen_heap, process_rss
from verl.utils.disk import lock_folder
from verl.utils.rng import seed_everything

logger = logging.getLogger("verl.trainer")

GUARDS: tuple[type[Guard], ...] = (
    OperatorWatch,  # first: it tells what an interrupted operator means
    Interruption,
    ProfiledSteps,  # before guards that may end the run after the step
    BadSteps,
    MismatchLimit,
    ValidationWatch,
    Restarts,  # last: what no other guard can repair
)
"""The guards of a run, in the order in which they are asked: of an error, the first action counts."""


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
        guards: watch the run, and may stop it, roll it back or restart it (docs/custom_trainer.md). Append your own.
        view: what guards see of the run.
    """

    #: roles whose state is saved in a checkpoint, each into the folder of its name
    saved_roles: tuple[str, ...] = ()
    #: whether the seconds of each operator are logged, unless trainer.log_operators says so
    logs_operators: ClassVar[bool] = False
    #: operators that limit their waits themselves
    unwatched: frozenset[str] = frozenset()

    def __init__(self, run: Run, source: PromptSource):
        trainer = run.config.trainer
        self.run, self.cluster, self.source = run, run.cluster, source
        self.tokenizer = run.inputs.tokenizer
        self.folder = run.working_dir / trainer.default_local_dir
        self.roles: dict[str, WorkerGroup] = StartedRoles()
        self.batch: DataProto | None = None
        self.on_step: list[Callable[[StepReport], None]] = []
        guards = [make(run.config) for make in GUARDS]
        self.guards = [*(guard for guard in guards if guard.is_on), *load_callbacks(trainer.callbacks)]
        self._watch = next(guard for guard in self.guards if isinstance(guard, ValidationWatch))
        total_steps: int = trainer.total_training_steps or source.steps_per_epoch * trainer.total_epochs
        self.view = RunView(run, source, self.roles, self.folder, total_steps, self.unwatched)
        self.runner = self.make_runner()
        flow = self._checked_flow("build_flow", self.build_flow())
        self.pipeline: Pipeline = self.runner.compile(self._checked_flow("finish_flow", self.finish_flow(flow)))
        self.pipeline.log_level = self.operator_level
        self.view.pipelines.append(self.pipeline)
        run.columns = {column for operator in self.pipeline.operators for column in operator.writes}
        run_checks(run, FLOW)
        self.checkpoints = CheckpointStore(self.folder, keep=None)
        self.checkpointer = self.view.checkpointer = Checkpointer(
            self.checkpoints, run, self.saved_roles, self.roles, self.pipeline, self.checkpoints_to_keep, self._watch
        )
        self._started = False
        self._attempt = ExitStack()  # logs and guards of an attempt, which ends with the run or with an error
        self._log: RunLog | None = None
        self._steps_to_add: int | None = None
        self._skips_step = self._save_is_pending = False

    # ---- what a subclass defines ------------------------------------------------------------------------------------

    @abstractmethod
    def init_workers(self) -> None:
        """Fill `self.roles` with the worker groups that the flow needs. Models are loaded here, not before."""

    @abstractmethod
    def build_flow(self) -> DataFlow:
        """The training flow. To change the algorithm, override it and edit what super() returns."""

    def finish_flow(self, flow: DataFlow) -> DataFlow:
        """The last edit of the flow, after `build_flow` and its overrides."""
        return flow

    def make_runner(self) -> FlowRunner:
        return FlowRunner(self.view)

    @abstractmethod
    def plan(self) -> str:
        """Description of the run, in one paragraph."""

    @abstractmethod
    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        """Metrics of a finished batch, in addition to those of the operators."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics of the current weights on the validation data; empty if there is none."""

    def draw_samples(self, batch: DataProto, count: int) -> Rows:
        """Return `count` samples of a finished batch, drawn at random: a table with input, output and score."""
        return ()

    def step_record(self, batch: DataProto) -> Mapping[str, Any]:
        """Return what `verl report` shows of a finished batch, as JSON; empty: nothing."""
        return {}

    def validation_samples(self) -> Rows:
        """Return samples of the last validation for the trackers."""
        return ()

    def announce(self) -> None:
        logger.info("%s", self.plan().replace("would train", "training", 1))

    def before_first_step(self) -> None:  # noqa: B027 (optional hook)
        """Called after `init_workers` and `load`, before the first step or validation; also after running workers have
        loaded a checkpoint again, and before the step after a failed one."""

    def checkpoints_to_keep(self) -> dict[str, int | None]:
        """Role -> how many of the newest checkpoints are kept, of which the largest number counts; None: no limit."""
        return dict.fromkeys(self.saved_roles)

    # ---- the loop ---------------------------------------------------------------------------------------------------

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
        self.runner.check_steps(steps)
        keep_workers, view, metrics = self._started, self.view, dict[str, float]()
        view.restarts, view.interrupted, view.stop_reason, self._steps_to_add = 0, None, self._watch.reason, steps
        view.has_failed = False
        with closing(self.source), lock_folder(self.folder):
            while True:  # again after a step that was undone, a rollback or a restart
                try:
                    metrics |= self._begin()
                    while not self._is_over():
                        ask(self.guards, view, "before_step")
                        report = self.step()
                        self._log.step(report)
                        self._skips_step = SKIP in ask(self.guards, view, "after_step", report)
                        report.metrics.update(self._validate_if_due())
                        metrics |= report.metrics
                        self._save_if_due()
                        for callback in self.on_step:
                            callback(report)
                    self._end()
                    break
                except BaseException as error:
                    if not self._recover(error):
                        raise
            in_process = self.runner.keeps_workers and all(group.processes is None for group in self.roles.values())
            if not (keep_workers or in_process):
                self.shutdown()
        return metrics

    def _begin(self) -> dict[str, float]:
        """Begin an attempt, unless it only lost a step. Returns the metrics of a validation that comes before."""
        if self._log is not None:
            return {}
        was_started, view, trainer = self._started, self.view, self.config.trainer
        log = RunLog(view, self.draw_samples, self.step_record)
        self._attempt.enter_context(log.record)
        self.start()
        if self._steps_to_add is not None:  # not again after a restart
            view.total_steps, self._steps_to_add = view.step + self._steps_to_add, None
        elif was_started and view.step >= view.total_steps:
            logger.warning("nothing to train: the run ended at step %d; see fit(steps)", view.step)
        self._attempt.enter_context(frozen_heap())  # freeze long-lived objects out of garbage collection
        self._attempt.enter_context(log.steps())
        self._log, self._skips_step = log, False
        for guard in self.guards:
            self._attempt.callback(guard.at_end, view)
            guard.at_start(view)
        # pending: it was due when the run was interrupted
        if not (trainer.val_only or (trainer.val_before_train and view.step == 0) or self._watch.is_pending):
            return {}
        metrics = self._validate()
        if self._watch.is_best(view.step) and not trainer.val_only:
            self.checkpointer.save(view.step, is_due=self._is_due(trainer.save_freq))
        return metrics

    def _end(self) -> None:
        """End an attempt that has no further steps. Raises Stopped after SIGINT or SIGTERM."""
        view = self.view
        if view.interrupted is not None and view.step > 0:  # received after a step was saved
            self._save_if_due()
        self.checkpointer.wait()
        if view.stop_reason is not None:
            log = logger.error if view.has_failed else logger.info
            log("stopped at step %d of %d: %s", view.step, view.total_steps, view.stop_reason)
        if view.interrupted is not None and view.end_reason is None:
            raise Stopped(view.interrupted, finished=True)
        self._log = None
        self._attempt.close()

    def _recover(self, error: BaseException) -> bool:
        """After an error, do what a guard decides: undo the step, roll back or restart. Otherwise end the workers.
        Returns whether the run continues. Raises the error that a guard has replaced it by."""
        action, last = decide(self.guards, self.view, error)
        if action not in (None, ROLL_BACK, RESTART):  # the step is undone
            return True
        self._log = None
        try:
            self._attempt.__exit__(type(last), last, last.__traceback__)
        finally:
            if action is not ROLL_BACK:
                self.checkpointer.finish_pending_save(last)
                self.shutdown()
        if action is ROLL_BACK:
            try:
                self._roll_back(last)
            except BaseException as second:
                return self._recover(second)
        elif action is RESTART:
            self.view.restarts += 1
            if self.config.trainer.allow_smaller:
                self.run.config = settings_for_devices_left(self.view, last)
            log_restart(self.view, last)
            self.rewind()
        elif last is not error:
            raise last
        return action is not None

    def _roll_back(self, error: BaseException) -> None:
        """Return to the last checkpoint, and continue with the prompts after those of the steps since."""
        failed = self.global_step
        # the first operator is the source, which may have a queue of prompts (dynamic sampling)
        source = self.pipeline.operators[0].stateful or self.source
        position = source.state_dict()
        self.rewind()
        source.load_state_dict(position)
        self.checkpointer.rollbacks += 1
        logger.warning(
            "%s. Rolled back from step %d to step %d; the prompts of the steps in between are not used again",
            *(error, failed, self.global_step),
        )

    def _is_over(self) -> bool:
        view = self.view
        return self.config.trainer.val_only or view.interrupted is not None or view.end_reason is not None

    def _is_due(self, freq: int | str) -> bool:
        """Whether an action with this frequency, such as `trainer.save_freq`, is due after this step."""
        if freq == "after_each_epoch":
            freq = self.source.steps_per_epoch
        return isinstance(freq, int) and freq > 0 and self.view.step % freq == 0

    def _save_if_due(self) -> None:
        trainer, view = self.config.trainer, self.view
        is_due = self._is_due(trainer.save_freq) or (self._is_over() and trainer.save_at_end) or self._save_is_pending
        if not (is_due or self._watch.is_best(view.step)) or self.checkpointer.saved_step == view.step:
            return
        # a run that ends for bad steps must resume from before them
        self._save_is_pending = self._skips_step and view.step < view.total_steps
        if self._save_is_pending:
            logger.warning("step %d is not saved, since updates were skipped: the next good one is", view.step)
        else:
            self.checkpointer.save(view.step, is_due)

    def _validate_if_due(self) -> dict[str, float]:
        freq = self.config.trainer.test_freq
        if not (self._is_due(freq) or (freq not in (-1, 0) and self.view.step == self.view.total_steps)):
            return {}
        # a validation can take longer than the time between SIGTERM and SIGKILL
        self._watch.is_pending = self.view.interrupted is not None
        return {} if self._watch.is_pending else self._validate()

    def _validate(self) -> dict[str, float]:
        start = time.perf_counter()
        metrics = self.validate()
        if metrics:
            metrics["timing_s/testing"] = time.perf_counter() - start
            self._log.validation(metrics, self.validation_samples())
            logger.log(self.operator_level, "[validate] %.2fs", metrics["timing_s/testing"])
        if not self._skips_step:
            ask(self.guards, self.view, "after_validation", metrics)
        return metrics

    # ---- steps and workers ------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Train one step: run the flow until it returns a batch. The first call starts the workers.

        Guards and functions in `on_step` are called by `fit` only, which also logs, validates and saves. A step that
        raises does not count, and the next one draws its prompts again; updates of weights that it has made remain.

        Returns:
            The metrics, a mapping with the attributes step, timings and batch.
        """
        self.start()
        self.checkpointer.poll()
        view, total = self.view, self.view.total_steps
        if view.failed_step is not None and self.runner.keeps_workers:
            self.before_first_step()
        position, epoch, view.failed_step = self.runner.position(), self.source.epoch, None
        view.step += 1
        view.total_steps = max(total, view.step)
        try:
            batch, timings, seconds = self.runner.run()
            metrics = dict(batch.meta_info["metrics"]) | self.step_metrics(batch)
        except BaseException as error:
            view.failed_step = None if isinstance(error, UnfinishedStep) else view.step
            view.step, view.total_steps = view.step - 1, total
            self.runner.undo(position)
            raise
        metrics |= timing_metrics(timings, seconds, int(batch.batch["attention_mask"].sum()), self.world_size)
        metrics |= {"training/global_step": view.step, "training/epoch": epoch}
        metrics["perf/cpu_memory_used_gb"] = process_rss() / 2**30
        metrics |= {"training/restarts": view.restarts} if self.config.trainer.max_restarts else {}
        self.batch, view.metrics = batch, metrics
        return StepReport(view.step, view.total_steps, metrics, timings, batch)

    def start(self) -> None:
        """Start the workers, resume from the newest checkpoint if there is one, and push the weights to the rollout.

        Does nothing if this is done. `fit`, `step`, `validate` and `generate` call it.
        """
        if self._started:
            return
        self.view.failed_step = None
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
        self._started = self.view.ready = True

    def shutdown(self) -> None:
        """End the workers. The weights of steps after the last checkpoint end with them."""
        with self.runner.stopping():
            for group in set(self.roles.values()):
                group.shutdown()
            self.cluster.shutdown()
            self.source.close()
            self.roles.clear()
            self._started = False

    def __enter__(self) -> Self:
        """Start the workers and keep them until the block ends."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write the checkpoint `global_step_N` of the current step."""
        return self.checkpointer.save(self.global_step)

    def load(self) -> None:
        """Resume from the newest complete checkpoint, or from trainer.resume_from_path; otherwise do nothing. Raises
        ValueError if this trainer has completed steps, but there is no checkpoint with their weights."""
        view, step = self.view, self.checkpointer.load()
        if step == 0 and view.step > 0:
            raise ValueError(
                f"the trainer is at step {view.step}, but there is no checkpoint to resume from, and the "
                "weights of these steps ended with the workers of the last fit(): set trainer.save_freq and "
                "trainer.resume_mode=auto to continue in another fit(), or make a new trainer"
            )
        view.step, view.stop_reason = step, self._watch.reason
        if step and not (self.config.trainer.val_only or self._watch.is_pending or view.end_reason is None):
            warn_nothing_to_train(view)
        self.runner.reset_to(step, view.total_steps)

    def rewind(self) -> None:
        """Return to the last checkpoint of this run, or to the state before its first step if there is none. Workers
        that are running load it now, others when they start. Raises ValueError if there is neither."""
        self.checkpointer.check_can_rewind()  # before the weights are lost
        was_saved = self._started and self.checkpointer.saved_path is not None
        if not (was_saved and self.runner.keeps_workers):
            if was_saved:
                self.checkpointer.wait()
            self.shutdown()
        self._save_is_pending = False
        self.view.step = self.checkpointer.rewind(self._started)
        self.view.stop_reason = self._watch.reason
        if self._started:
            self.runner.reset_to(self.global_step, self.total_steps)
            self.before_first_step()
        elif was_saved:
            self.start()

    # ---- messages ---------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Schema:
        return self.run.config

    @property
    def global_step(self) -> int:
        return self.view.step

    @property
    def total_steps(self) -> int:
        return self.view.total_steps

    @total_steps.setter
    def total_steps(self, steps: int) -> None:
        self.view.total_steps = steps

    @property
    def operator_level(self) -> int:
        """Log level of the lines `[gen] 1.24s`."""
        setting = self.config.trainer.log_operators
        return logging.INFO if (self.logs_operators if setting is None else setting) else logging.DEBUG

    @property
    def world_size(self) -> int:
        return self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node

    def __repr__(self) -> str:
        flow = " -> ".join(op.name for op in self.pipeline.operators)
        state = "workers started" if self._started else "workers not started"
        return f"{type(self).__name__}(step {self.global_step} of {self.total_steps}, {state}; flow: {flow})"

    def progress_summary(self) -> str:
        """Message for a run that ends early: its step, and the checkpoint from which it resumes."""
        step = self.view.attempted_step
        progress = f"in step {step} of {max(step, self.total_steps)}" if step else "before the first step"
        return f"{progress}; {self.checkpointer.resume_hint()}"

    def passed_checks(self) -> Sequence[str]:
        """Names of the preflight checks that have passed."""
        return self.run.passed

    def _checked_flow(self, method: str, flow: Any) -> DataFlow:
        """What a method returned. Raises ValueError if it is not a flow."""
        if not isinstance(flow, DataFlow):
            name = f"{type(self).__name__}.{method}"
            raise ValueError(f"{name} returned {flow!r}, expected a DataFlow: end it with `return flow`")
        return flow
