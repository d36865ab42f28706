"""Checkpointer: saves and restores the state of a trainer in `global_step_N`.

    checkpointer.save(step)            # returns while a background write may still be running
    checkpointer.poll()                # before each step: complete the pending checkpoint if it is written
    checkpointer.wait()                # at the end: wait for it
    step = checkpointer.load()         # 0 if there is nothing to resume from

A checkpoint is complete once everything is written and it has its final name.
"""

import copy
import logging
import operator
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoints.manifest import DELETE, MANIFEST
from verl.checkpoints.store import CheckpointStore
from verl.config import dump_config, to_flat_dict
from verl.config.fields import Schema
from verl.config.schema.trainer import RunConfig
from verl.data.dataset import TokenizedDataset
from verl.data.processor import copy_processor_files
from verl.dataflow import Pipeline, running
from verl.processes.limits import Durations
from verl.single_controller import WorkerGroup
from verl.single_controller.cluster import wait_limits
from verl.trainer.guards.early_stopping import ValidationWatch
from verl.trainer.guards.interruption import Stopped
from verl.trainer.guards.operator_watch import OperatorTimeout
from verl.trainer.state.identity import Identity
from verl.trainer.state.saved_state import load_state, save_state
from verl.utils.disk import DiskError, file_sizes, folder_size, format_bytes
from verl.utils.redaction import redacted
from verl.utils.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from verl.trainer.checks.preflight import Run

logger = logging.getLogger("verl.trainer")

_POLL_INTERVAL = 0.05  # seconds between two polls of a checkpoint that is being written
_REPORT_INTERVAL = 5.0  # seconds between two lines about a checkpoint that the run waits for
_VISIBLE_SECONDS = 60.0  # for a file to be visible on all nodes: network file systems cache their folders

_RESTARTS = {"optimizer": "the moments of Adam start at 0", "extra": "the learning-rate schedule starts over"}


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn errors of a state with other contents than `save` writes into a ValueError with their place. The stack is
    logged: the cause may also be a `load_state_dict` of the user, and commands print one line."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        logger.error("%s: the state of the trainer cannot be restored", folder, exc_info=error)
        raise ValueError(
            f"{folder}: the state of the trainer cannot be restored: {error!r} ({Path(last.filename).name}:"
            f"{last.lineno}): it is damaged, of another version, or its `load_state_dict` failed (the log has the "
            f"stack); if it is damaged, {DELETE}"
        ) from error


@contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    """While the run waits for a checkpoint, log every few seconds how much of it is written."""
    done, start = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(_REPORT_INTERVAL):
            with suppress(OSError):  # the folder is renamed or removed meanwhile
                written = format_bytes(folder_size(folder))
                logger.info("[save] %s: %s in %.0f s", folder.name[1:], written, time.monotonic() - start)

    threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        done.set()


class BadStepsError(FloatingPointError):
    """Weights or too many updates are broken: the run stops or rolls back."""


@dataclass
class _Pending:
    """A checkpoint that is being written.

    Attributes:
        start: `perf_counter` at the start.
        written: the folder until it is complete.
        folder: completes it when closed.
        best: for `CheckpointStore.mark_best`, if it is the best one.
        sealing: of the thread that computes the checksums, once all roles have written.
    """

    path: Path
    start: float
    written: Path
    folder: ExitStack
    best: Mapping[str, Any] | None
    sealing: Future[None] | None = None


def describe_saving(trainer: RunConfig) -> str:
    """Text such as "every 20 steps, at the end", for the plan of a run; "never" if it saves no checkpoint."""
    rare = {-1: "", 0: "", "after_each_epoch": "after each epoch"}
    regular = rare.get(trainer.save_freq, f"every {trainer.save_freq} steps")
    occasions = [regular, "at the end" if trainer.save_at_end else "", "the best" if trainer.save_best else ""]
    return ", ".join(occasion for occasion in occasions if occasion) or "never"


@dataclass(eq=False, repr=False)
class Checkpointer:
    """Saves, prunes and restores the state of a run: weights, optimizers, flow and random states.

    Args:
        store: the folders on disk.
        run: its settings are saved with the state, and define what to resume from; its inputs are compared with those
            of a checkpoint.
        saved_roles: roles whose state is saved, each in a folder of that name.
        roles: role -> worker group; filled before the first save or load.
        pipeline: the flow, whose state is saved.
        keep: role -> number of newest checkpoints to keep; None: not limited. The largest number counts.
        watch: its state is saved; it names the best checkpoint.

    Attributes:
        saved_step: step of the last checkpoint that was saved or loaded; None before.
        saved_path: its folder.
        rollbacks: how often the run has returned to a checkpoint because of bad steps.
    """

    store: CheckpointStore
    run: "Run"
    saved_roles: Sequence[str]
    roles: Mapping[str, WorkerGroup]
    pipeline: Pipeline
    keep: Callable[[], Mapping[str, int | None]]
    watch: ValidationWatch

    def __post_init__(self) -> None:
        self.identity = Identity(self.run.config, self.run.working_dir, self._data_digests)
        self.saved_step: int | None = None
        self.saved_path: Path | None = None
        self.rollbacks = 0
        self._rewound = False  # the next `load` continues this run, rather than starting it
        self._initial: tuple[dict[str, Any], dict[str, Any]] | None = None  # of pipeline and watch, before step 1
        self._durations = Durations(wait_limits(self.run.config))
        self._serial: int | None = None  # of the newest checkpoint before this run
        self._pending: _Pending | None = None
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._saves = describe_saving(self.run.config.trainer) != "never"

    @property
    def config(self) -> Schema:
        return self.run.config

    # ---- writing ----------------------------------------------------------------------------------------------------

    def save(self, step: int, is_due: bool = True) -> Path:
        """Write `global_step_<step>`. is_due: false if it is saved only because it is the best so far.

        Roles with checkpoint.async_save write in the background while training continues. The checkpoint is complete
        (it is renamed to its final name, and older ones are deleted) once everything is written.

        Raises:
            BadStepsError: weights or optimizer state are broken; earlier checkpoints are unchanged.
        """
        self.wait()
        with running("save"):
            return self._save(step, is_due)

    def _save(self, step: int, is_due: bool) -> Path:
        for role in self._present_roles():
            self.require_finite(role, step)
        if self._serial is None:  # a custom loop
            self._serial = self.store.last_serial()
        start, path = time.perf_counter(), self.store.path(step)
        with ExitStack() as stack, ExitStack() as reports:
            folder = stack.enter_context(self.store.writing(step))
            reports.enter_context(_reporting(folder))
            for role in self._present_roles():
                self.roles[role].save_checkpoint(folder / role)
                self.run.inputs.tokenizer.save_pretrained(folder / role / "huggingface")
                copy_processor_files(self.run.inputs.model, folder / role / "huggingface")
            state = {"global_step": step, "flow": self.pipeline.state_dict(), "rng": rng_state()}
            state |= {"validations": self.watch.state_dict(), "rollbacks": self.rollbacks}
            state["identity"] = self.identity.state()
            save_state(state | {"config": redacted(to_flat_dict(self.config))}, folder, "trainer")
            (folder / "config.yaml").write_text(dump_config(self.config, redact=True), encoding="utf-8")
            is_best = self.watch.is_best(step)
            record = asdict(self.watch.best) | {"saved_as_best": not is_due} if is_best else None
            self._pending = _Pending(path, start, folder, stack.pop_all(), record)
        self.saved_step, self.saved_path = step, path
        self.poll(wait=self._is_written())
        if self._pending is not None:
            logger.info("[save] blocked for %.2fs; writing %s in the background", time.perf_counter() - start, path)
        return path

    def require_finite(self, role: str, step: int) -> None:
        """Raise BadStepsError if weights or optimizer state of a role are not finite, or weights have diverged."""
        if broken := self._broken(role):
            raise BadStepsError(
                f"step {step} is not saved: the {role} contains {broken}, so it can no longer be trained. "
                "Check the learning rate, the gradient norm and the KL of the previous steps; lower optim.lr or "
                f"optim.clip_grad of the {role}, or use more warm-up steps; {self.resume_hint()}"
            )

    def _broken(self, role: str) -> str:
        """Which weights or optimizer state of a role are not finite or have diverged; empty if none."""
        (names, *_) = self.roles[role].non_finite_state()
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"NaN, infinity or weights beyond 1e6 in {names[0]}{others}" if names else ""

    def check_folder_is_shared(self) -> None:
        """Raise DiskError if a rank does not see the files that this process writes: no checkpoint would be whole."""
        for role in self._present_roles():
            if self.roles[role].world_size > 1:
                self.store.root.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=".probe_", dir=self.store.root) as folder:
                    (Path(folder) / "file").touch()
                    self._check_shared(role, Path(folder))

    def _check_shared(self, role: str, folder: Path) -> None:
        """Raise DiskError unless every rank of a role sees the same files in a folder as this process."""
        until = time.monotonic() + _VISIBLE_SECONDS
        while True:
            files = file_sizes(folder)
            seen = self.roles[role].list_files(folder)
            others = [rank for rank, sizes in enumerate(seen) if sizes != files]
            if not others:
                return
            if time.monotonic() > until:
                break
            time.sleep(1.0)
        missing = sorted(set(files.items()) ^ set(seen[others[0]].items()))
        raise DiskError(
            f"{self.store.root} is not one folder for the whole run: of {folder.name}, rank {others[0]} of the {role} "
            f"sees {len(seen[others[0]])} files and the controller {len(files)} (different: {missing[0][0]}). Expected "
            "a file system that all nodes mount at this path (docs/multinode.md): set trainer.default_local_dir to a "
            "folder on it; without checkpoints: trainer.save_freq=-1 trainer.save_at_end=false"
        )

    def wait(self) -> None:
        """Complete the pending checkpoint, once it is written."""
        self.poll(wait=True)

    def poll(self, wait: bool = False) -> None:
        """Complete the pending checkpoint if it is written. Raises the error of a role that could not write."""
        if self._pending is None:
            if self._saves:
                self.store.warn_of_space()
            return
        pending = self._pending
        with _reporting(pending.written) if wait else nullcontext():
            try:
                if not self._is_sealed(pending, wait):
                    return
            except Exception:
                self._pending = None
                with pending.folder:
                    raise
        self._pending = None
        pending.folder.close()
        if pending.best is not None:
            self.store.mark_best(pending.best)
            logger.info("[save] best checkpoint: %(metric)s = %(value).4g at step %(step)d", pending.best)
        limits = [keep for role, keep in self.keep().items() if keep is not None and role in self.roles]
        if limits:
            self.store.prune(max(limits))
        seconds = time.perf_counter() - pending.start
        self._durations.record("write", seconds)
        logger.info("[save] %.2fs %s", seconds, pending.path)

    def _is_written(self) -> bool:
        return all(all(self.roles[role].is_checkpoint_written()) for role in self._present_roles())

    def _is_sealed(self, pending: _Pending, wait: bool) -> bool:
        """Whether all roles have written, and a thread has computed the checksums. Raises their errors."""
        start, limit = time.monotonic(), self._durations.limit("write")
        while pending.sealing is None or not pending.sealing.done():
            if pending.sealing is None and self._is_written():
                for role in self._present_roles():
                    self.roles[role].finish_checkpoint()
                for role in self._present_roles():  # before the checksums: a file that is not visible has none
                    self._check_shared(role, pending.written / role)
                pending.sealing = self._sealer.submit(self.store.seal, pending.written)
            if not wait:
                return False
            if time.monotonic() - start > limit.seconds:
                raise OperatorTimeout(
                    f"{pending.path} is not written after {limit.seconds:g} s (limit: {limit.reason})"
                )
            # an interruption here leaves the write as it is
            time.sleep(_POLL_INTERVAL) if pending.sealing is None else futures.wait([pending.sealing], _POLL_INTERVAL)
        pending.sealing.result()
        return True

    def finish_pending_save(self, error: BaseException) -> None:
        """Complete the pending checkpoint of a run that failed with `error`, if its workers can still write it."""
        if self._pending is not None and isinstance(error, Stopped):  # a second signal: at once
            logger.warning("%s is discarded", self._pending.path)
            pending, self._pending = self._pending, None
            with suppress(Stopped), pending.folder:
                raise error
        if self._pending is not None and isinstance(error, KeyboardInterrupt):
            logger.warning("waiting for %s to be written; interrupt again to discard it", self._pending.path)
        try:
            self.wait()
        except Exception as second:
            error.add_note(f"the checkpoint that was being written is lost: {second}")

    # ---- reading ----------------------------------------------------------------------------------------------------

    def load(self) -> int:
        """Restore the checkpoint that trainer.resume_mode names. Returns its step; 0 if there is none."""
        if self._saves:
            self.check_folder_is_shared()
            weights = Path(self.run.inputs.model.path).glob("*.safetensors")
            self.store.warn_of_space(sum(path.stat().st_size for path in weights))
        folder = self._folder_to_load()
        step = 0 if folder is None else self.restore(folder)
        self._rewound = False
        return step

    def restore(self, folder: Path) -> int:
        """Restore the checkpoint in a verified folder. Returns its step."""
        state = load_state(folder, "trainer")
        with _reading(folder):
            self.identity.check(state.get("identity", {}), state["config"], folder)
        for role in self._present_roles():
            if not (folder / role).is_dir():
                raise ValueError(
                    f"{folder} has no {role}: it was written by a run without one. Start a fresh run "
                    "(trainer.resume_mode=disable, or another trainer.default_local_dir), or resume with the settings "
                    "of that run"
                )
            (not_loaded, *_) = self.roles[role].load_checkpoint(folder / role)
            for content in not_loaded:
                logger.warning(
                    "RESUMED WITHOUT %s: the %s of %s is resumed without it, since its checkpoint.load_contents "
                    "(default: its save_contents) does not contain %r: %s, so the run differs from an uninterrupted "
                    "one",
                    *(content.upper(), role, folder, content, _RESTARTS[content]),
                )
            if broken := self._broken(role):
                raise ValueError(f"{folder}: the {role} contains {broken}; {DELETE}")
        with _reading(folder):
            step, rollbacks = operator.index(state["global_step"]), operator.index(state.get("rollbacks", 0))
            self.pipeline.load_state_dict(state["flow"])
            set_rng_state(state["rng"])
            if "validations" in state:
                self._restore_best(state["validations"])
        self.saved_step, self.saved_path, self.rollbacks = step, folder, rollbacks
        logger.info("resumed from %s: %d steps are done", folder, step)
        return step

    def _restore_best(self, state: Mapping[str, Any]) -> None:
        """Restore the watch. `best_checkpoint.json` names its best checkpoint again, if that still exists: they differ
        if the run was killed before the file was written, or resumes from an earlier checkpoint."""
        self.watch.load_state_dict(state)
        best, marked = self.watch.best, self.store.best()
        if best is None or (marked and {**marked, **asdict(best)} == marked):
            return
        if (self.store.path(best.step) / MANIFEST).is_file():
            self.store.mark_best(asdict(best) | {"saved_as_best": False})

    def start_of_run(self, step: int) -> None:
        """Later checkpoints are those of this run, also with resume_mode=disable. step: completed steps."""
        if self._serial is None:
            self._serial = self.store.last_serial()
        if step == 0 and not self._rewound:
            self._initial = copy.deepcopy((self.pipeline.state_dict(), self.watch.state_dict()))

    def newest_of_run(self) -> Path | None:
        """The newest complete checkpoint from which a restart of this run may continue."""
        auto = self.config.trainer.resume_mode == "auto"
        return self.store.newest(0 if auto else self._serial or 0)

    @property
    def can_rewind(self) -> bool:
        """Whether there is a state to which the run can return."""
        return self._initial is not None or self.newest_of_run() is not None

    def check_can_rewind(self) -> None:
        """Raise ValueError if there is no state to which the run can return."""
        if not self.can_rewind:
            raise ValueError(f"the run cannot return to an earlier step: there is no checkpoint in {self.store.root}")

    def rewind(self, into_workers: bool) -> int:
        """Return to the last checkpoint of this run: `Trainer.rewind`. Returns its step. into_workers: restore it now.
        Otherwise, return to the state before the first step, and the next `load` continues from the newest checkpoint,
        if there is one."""
        if into_workers:
            self.wait()
            return self.restore(self.saved_path)
        self.check_can_rewind()
        self._rewound = True
        self.saved_step = self.saved_path = None  # it may not be written completely
        if self._initial is not None:
            pipeline, watch = copy.deepcopy(self._initial)
            self.pipeline.load_state_dict(pipeline)
            self.watch.load_state_dict(watch)
        return 0

    def _folder_to_load(self) -> Path | None:
        trainer = self.config.trainer
        if self._rewound and trainer.resume_mode != "auto" and self.newest_of_run() is not None:
            return self.store.latest(self._serial or 0)
        if trainer.resume_mode == "disable":
            return None
        if trainer.resume_mode == "resume_path":
            return self.store.resume_path(trainer.resume_from_path)
        return self.store.latest()

    def _data_digests(self) -> dict[str, str | None]:
        """Digests of training data that `Identity` does not find as files."""
        dataset = self.run.inputs.train_dataset
        return {"rows in memory": dataset.rows_digest} if isinstance(dataset, TokenizedDataset) else {}

    # ---- messages ---------------------------------------------------------------------------------------------------

    def newest(self) -> str:
        """The newest checkpoint, for a message."""
        saved = self.store.newest()
        return "no checkpoint was saved" if saved is None else f"the newest checkpoint is {saved}"

    def resume_hint(self) -> str:
        """From which checkpoint a run that ends now would resume, for a message."""
        saved, trainer = self.store.newest(), self.config.trainer
        if saved is None:
            save_at_end = "true" if trainer.save_at_end else "false"  # as in YAML
            settings = f"trainer.save_freq is {trainer.save_freq}, trainer.save_at_end is {save_at_end}"
            return f"no checkpoint was saved ({settings})"
        if trainer.resume_mode == "disable":
            return f"the newest checkpoint is {saved}: trainer.resume_mode=auto resumes from it"
        return f"the same command resumes from {saved}"

    def _present_roles(self) -> list[str]:
        return [role for role in self.saved_roles if role in self.roles]
