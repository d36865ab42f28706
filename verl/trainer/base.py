"""Trainer: the one training loop. A trainer is a flow, the workers it runs on, and the bookkeeping around them.

Everything that a user can get wrong is checked in the constructor, before a model is loaded.
"""

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoints.store import CheckpointStore
from verl.config import dump_config, to_flat_dict
from verl.data.files import PromptSource
from verl.dataflow import HOLD, DataFlow, Pipeline
from verl.protocol import DataProto
from verl.single_controller import WorkerGroup
from verl.tracking.tracking import Tracking
from verl.trainer.metrics import timing_metrics
from verl.trainer.saved_state import load_state, save_state
from verl.utils.lock import lock_folder
from verl.utils.rng import rng_state, seed_everything, set_rng_state

logger = logging.getLogger("verl.trainer")

#: settings that may differ between a run and its resumption without a word
_FREE_TO_CHANGE = (
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.total_training_steps",
    "trainer.total_epochs",
    "trainer.logger",
)


_LOOK = 0.05  # seconds between two looks at a checkpoint that is being written
_LONGEST_WRITE = 3600.0  # seconds after which one is given up


@dataclass(frozen=True)
class StepReport:
    """What a callback in `Trainer.on_step` learns after each step. metrics holds timing_s/* among the rest."""

    step: int
    total_steps: int
    metrics: dict[str, float]
    timings: dict[str, float]
    batch: DataProto


@dataclass(frozen=True)
class _Saving:
    """A checkpoint that is being written. start: of the save, by perf_counter. folder: seals it when it is closed."""

    path: Path
    start: float
    folder: ExitStack


class Trainer(ABC):
    """Owns fit, step, save and load; a subclass says what the flow is, who executes it, and how it is validated.

    config: a configuration tree with a `trainer` section. source: where the training rows come from.
    on_step: functions called with a StepReport after each step.
    """

    #: roles whose state goes into a checkpoint, each into the folder of its name
    saved_roles: tuple[str, ...] = ()

    def __init__(self, config: Any, source: PromptSource, tokenizer: Any):
        self.config = config
        self.source = source
        self.tokenizer = tokenizer
        self.total_steps: int = config.trainer.total_training_steps or (
            source.steps_per_epoch * config.trainer.total_epochs
        )
        self.global_step = 0
        #: the workers are there and the checkpoint is loaded: what fails from now on is no mistake in the set-up
        self.ready = False
        self.roles: dict[str, WorkerGroup] = {}
        self.on_step: list[Callable[[StepReport], None]] = []
        self.checkpoints = CheckpointStore(Path(config.trainer.default_local_dir), keep=None)
        self._saving: _Saving | None = None
        self._skipped: dict[str, int] = {}  # metric of a role -> steps in a row in which none of its updates was made
        self.pipeline: Pipeline = self.finish_flow(self.build_flow()).compile()

    # ---- what a subclass says -----------------------------------------------------------------------------------

    @abstractmethod
    def init_workers(self) -> None:
        """Fill `self.roles` with the worker groups that the flow needs. Models are loaded here, not before."""

    @abstractmethod
    def build_flow(self) -> DataFlow:
        """The training flow. Override it, and edit what super() gives, to change the algorithm."""

    def finish_flow(self, flow: DataFlow) -> DataFlow:
        """The last edit, after those of `build_flow` and its overrides: what a flow can do without, seen as a whole."""
        return flow

    @abstractmethod
    def announce(self) -> None:
        """Say once, in numbers, what is going to run."""

    @abstractmethod
    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        """What is reported of a finished batch, beside what the operators reported."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics of the current weights on the validation rows; empty when there are none."""

    @property
    def world_size(self) -> int:
        return self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node

    # ---- the loop -----------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the end, from the last checkpoint if there is one. Returns the last metrics.

        Raises InUseError where another run is at work in trainer.default_local_dir.
        """
        with lock_folder(self.checkpoints.root):
            return self._run()

    def _run(self) -> dict[str, float]:
        trainer = self.config.trainer
        seed_everything(trainer.seed)
        self.announce()
        if trainer.save_freq <= 0 and not trainer.val_only:
            logger.warning("the trained model will not be saved: trainer.save_freq is %d", trainer.save_freq)
        try:
            self.init_workers()
            self.load()
            self.ready = True
            # what is there by now stays to the end: the collector need not look through all of it at every step
            gc.collect()
            gc.freeze()
            with self._tracking() as tracking:
                metrics = self._fit(tracking)
            self._publish_saved(wait=True)
            return metrics
        except BaseException as error:
            self._rescue_saved(error)
            raise
        finally:
            self.shutdown()

    def where_it_stands(self) -> str:
        """For who interrupts a run: the step that it was in, and from where it can go on."""
        saved = self.checkpoints.newest()
        if saved is None:
            kept = f"nothing is saved (trainer.save_freq is {self.config.trainer.save_freq})"
        elif self.config.trainer.resume_mode == "disable":
            kept = f"saved is {saved}: trainer.resume_mode=auto goes on from there"
        else:
            kept = f"the same command goes on from {saved}"
        return f"in step {self.global_step} of {self.total_steps}; {kept}"

    def shutdown(self) -> None:
        """End the workers."""
        gc.unfreeze()
        for group in set(self.roles.values()):
            group.shutdown()

    def _fit(self, tracking: Tracking) -> dict[str, float]:
        trainer = self.config.trainer
        metrics: dict[str, float] = {}
        if (trainer.val_before_train and self.global_step == 0) or trainer.val_only:
            metrics = self._validate(tracking)
        if trainer.val_only:
            return metrics
        if self.global_step >= self.total_steps:
            logger.warning(
                "nothing to train: the checkpoint is of step %d and the run ends at step %d; raise "
                "trainer.total_training_steps or trainer.total_epochs to go on, or begin anew in another folder than "
                "%s (trainer.experiment_name or trainer.default_local_dir)",
                self.global_step,
                self.total_steps,
                self.checkpoints.root,
            )
        while self.global_step < self.total_steps:
            metrics |= self._step(tracking)
        return metrics

    def _step(self, tracking: Tracking) -> dict[str, float]:
        """One training step: the flow until a batch comes out of it, then log, validate and save when it is time."""
        trainer = self.config.trainer
        self._publish_saved(wait=False)
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
        tracking.log(metrics, self.global_step)
        self._check_skipped(metrics)
        last = self.global_step == self.total_steps
        if trainer.test_freq > 0 and (last or self.global_step % trainer.test_freq == 0):
            metrics |= self._validate(tracking)
        if trainer.save_freq > 0 and (last or self.global_step % trainer.save_freq == 0):
            if any(self._skipped.values()) and trainer.max_skipped_steps > 0 and not last:
                # who goes on after the end that may be near begins before the steps that changed nothing
                logger.warning("step %d is not saved: it made no update", self.global_step)
            else:
                self.save()
        report = StepReport(self.global_step, self.total_steps, metrics, timings, batch)
        for callback in self.on_step:
            callback(report)
        return metrics

    def _check_skipped(self, metrics: dict[str, float]) -> None:
        """A run that can no longer update a role ends. Raises FloatingPointError."""
        limit = self.config.trainer.max_skipped_steps
        for name, share in metrics.items():
            if not name.endswith("grad_skipped"):
                continue
            self._skipped[name] = self._skipped.get(name, 0) + 1 if share == 1 else 0
            if 0 < limit <= self._skipped[name]:
                self._publish_saved(wait=True)
                raise FloatingPointError(
                    f"{name} was 1 for {limit} steps in a row: no gradient was finite, so nothing is learnt. Look at "
                    f"the metrics of the steps before (learning rate, KL, lengths); {self._last_saved()}. "
                    "trainer.max_skipped_steps says how many such steps are borne (0: any number)"
                )

    def _last_saved(self) -> str:
        saved = self.checkpoints.newest()
        return "nothing was saved" if saved is None else f"the newest checkpoint is {saved}"

    def _validate(self, tracking: Tracking) -> dict[str, float]:
        start = time.perf_counter()
        metrics = self.validate()
        if metrics:
            metrics["timing_s/testing"] = time.perf_counter() - start
            tracking.log(metrics, self.global_step)
            logger.info("[validate] %.2fs", metrics["timing_s/testing"])
        return metrics

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

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write `global_step_N`: the roles' weights and optimizers, the flow's state and every random state.

        Roles with checkpoint.async_save write on while training goes on. The checkpoint counts (it has its name, older
        ones are deleted) when all is written: seen before each step, waited for by the next save and the end.
        """
        self._publish_saved(wait=True)
        start, path = time.perf_counter(), self.checkpoints.path(self.global_step)
        with ExitStack() as stack:
            folder = stack.enter_context(self.checkpoints.writing(self.global_step))
            for role in self.saved_roles:
                if role in self.roles:
                    self.roles[role].save_checkpoint(folder / role)
                    self.tokenizer.save_pretrained(folder / role / "huggingface")
            state = {"global_step": self.global_step, "flow": self.pipeline.state_dict(), "rng": rng_state()}
            save_state(state | {"config": to_flat_dict(self.config)}, folder, "trainer")
            (folder / "config.yaml").write_text(dump_config(self.config))
            self._saving = _Saving(path, start, stack.pop_all())
        self._publish_saved(wait=False)
        if self._saving is not None:
            logger.info("[save] %.2fs until training goes on; %s is being written", time.perf_counter() - start, path)
        return path

    def _publish_saved(self, wait: bool) -> None:
        """Finish the checkpoint that is being written, if it is; wait: even if that takes time.

        Raises the error of a role that could not write its part; the folder is gone then.
        """
        if self._saving is None:
            return
        groups = [self.roles[role] for role in self.saved_roles if role in self.roles]
        limit = time.monotonic() + _LONGEST_WRITE
        try:
            while not all(all(group.is_checkpoint_written()) for group in groups):
                if not wait:
                    return
                if time.monotonic() > limit:
                    raise TimeoutError(f"{self._saving.path} is not written after {_LONGEST_WRITE:.0f} s")
                time.sleep(_LOOK)  # an interruption here leaves the write as it is
        except Exception:
            saving, self._saving = self._saving, None
            with saving.folder:
                raise
        saving, self._saving = self._saving, None
        with saving.folder:
            for group in groups:
                group.finish_checkpoint()
        for part, keep in self.checkpoints_to_keep().items():
            self.checkpoints.prune_subfolder(part, keep)
        logger.info("[save] %.2fs %s", time.perf_counter() - saving.start, saving.path)

    def _rescue_saved(self, error: BaseException) -> None:
        """A run that fails keeps the checkpoint that it was writing, if its workers can still finish it."""
        if self._saving is not None and isinstance(error, KeyboardInterrupt):
            logger.warning("waiting for %s, which is being written; interrupted again, it is lost", self._saving.path)
        try:
            self._publish_saved(wait=True)
        except Exception as second:
            error.add_note(f"the checkpoint that was being written is lost, too: {second}")

    def checkpoints_to_keep(self) -> dict[str, int | None]:
        """Role -> how many of its newest checkpoints stay; None keeps all."""
        return dict.fromkeys(self.saved_roles)

    def load(self) -> None:
        """Go on from the last complete checkpoint, or from trainer.resume_from_path; else from the beginning."""
        trainer = self.config.trainer
        if trainer.resume_mode == "disable":
            return
        if trainer.resume_mode == "resume_path":
            folder = self.checkpoints.resume_path(trainer.resume_from_path)
        else:
            folder = self.checkpoints.latest()
        if folder is None:
            return
        state = load_state(folder, "trainer")
        self._report_changed_settings(state["config"])
        for role in self.saved_roles:
            if role in self.roles:
                if not (folder / role).is_dir():
                    raise ValueError(
                        f"{folder} has no {role}: it is of a run without one. Start anew (trainer.resume_mode=disable, "
                        "or another trainer.default_local_dir), or go on with the settings of that run"
                    )
                (left_out, *_) = self.roles[role].load_checkpoint(folder / role)
                self._report_left_out(role, folder, left_out)
        self.pipeline.load_state_dict(state["flow"])
        set_rng_state(state["rng"])
        self.global_step = state["global_step"]
        logger.info("resumed from %s: step %d of %d", folder, self.global_step, self.total_steps)

    def _report_left_out(self, role: str, folder: Path, left_out: Sequence[str]) -> None:
        """Say what of a role begins anew although the run goes on."""
        begins = {"optimizer": "the moments of Adam begin at 0", "extra": "the learning-rate schedule begins anew"}
        for part in left_out:
            logger.warning(
                "RESUMED WITHOUT %s: the %s of %s goes on without it, since its checkpoint.load_contents (by default "
                "what save_contents says) does not name %r: %s, and the run will not be the one that was interrupted",
                part.upper(),
                role,
                folder,
                part,
                begins[part],
            )

    def _report_changed_settings(self, saved: dict[str, Any]) -> None:
        """Name every setting that differs from those of the run that wrote the checkpoint."""
        now = to_flat_dict(self.config)
        changed = [k for k in sorted(saved.keys() | now.keys()) if saved.get(k) != now.get(k)]
        words = [f"{k}: {saved.get(k)} -> {now.get(k)}" for k in changed if k not in _FREE_TO_CHANGE]
        if words:
            logger.warning(
                "resuming with other settings than the checkpoint's: %s (another trainer.experiment_name begins anew)",
                ", ".join(words),
            )
