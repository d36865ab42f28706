"""Bad steps: steps with a skipped update, or whose update broke the weights. They are dumped, counted, and end the run.

A bad step is not saved, so that a run never resumes from one. After `trainer.max_skipped_steps` bad steps in a row, or
at once if the weights are broken, the run stops or, with `trainer.on_bad_steps=rollback`, returns once to its last
checkpoint and continues with the prompts after the bad ones (as Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
"""

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import dump_config
from verl.config.schema.trainer import RunConfig
from verl.single_controller import WorkerGroup
from verl.trainer.state.checkpointing import BadStepsError
from verl.trainer.state.saved_state import save_state
from verl.utils.paths import resolved

if TYPE_CHECKING:
    from verl.trainer.base import StepReport, Trainer

logger = logging.getLogger("verl.trainer")

FOLDER = "bad_steps"
SKIPPED, BROKEN = "grad_skipped", "broken_tensors"
#: prefix of a metric -> the role that reports it, where they differ
_ROLES = {"train": "actor"}


class StepGuard:
    """Counts and dumps the bad steps of a run.

    Attributes:
        in_a_row: bad steps since the last good one.
        owes_save: whether a checkpoint was due at a bad step.
    """

    def __init__(self, trainer: "Trainer"):
        self._trainer = trainer
        self._dumps = 0
        self._dumped: Path | None = None  # the newest dump
        self.in_a_row = 0
        self.owes_save = False

    @property
    def is_bad(self) -> bool:
        """Whether the last step was bad, and the run may end for it."""
        return self.in_a_row > 0 and self._settings.max_skipped_steps > 0

    @property
    def _settings(self) -> RunConfig:
        return self._trainer.config.trainer

    def reset(self) -> None:
        """Forget the bad steps so far, which the run has undone."""
        self.in_a_row, self.owes_save = 0, False

    def defers_save(self) -> bool:
        """Whether a checkpoint that is due now is written at the next good step instead: a run that ends for bad steps
        must resume from before them."""
        step = self._trainer.global_step
        self.owes_save = self.is_bad and step < self._trainer.total_steps
        if self.owes_save:
            logger.warning("step %d is not saved, since updates were skipped: the next good one is", step)
        return self.owes_save

    def check(self, report: "StepReport") -> None:
        """Count and dump a bad step. Raises BadStepsError if the run cannot continue after it."""
        bad = {name: value for name, value in report.metrics.items() if name.endswith((SKIPPED, BROKEN)) and value > 0}
        if not bad:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self._dump(report, bad)
        checkpointer, limit = self._trainer.checkpointer, self._settings.max_skipped_steps
        for name in bad:
            if name.endswith(BROKEN):
                checkpointer.wait()
                checkpointer.require_finite(_role(name), report.step)
        if 0 < limit <= self.in_a_row:
            checkpointer.wait()
            raise BadStepsError(
                f"{limit} steps in a row had skipped updates ({_words(bad)} in step {report.step}): a gradient, a loss "
                "or a column of the batch was not finite. Look at the metrics of the steps before (learning rate, KL, "
                f"lengths). trainer.max_skipped_steps sets the limit (0: no limit){self._how_to_replay()}; "
                f"{checkpointer.newest()}"
            )

    def _how_to_replay(self) -> str:
        return f"; `verl replay {self._dumped}` shows the samples" if self._dumped is not None else ""

    def _dump(self, report: "StepReport", bad: dict[str, float]) -> None:
        """Write what `verl replay` needs. A dump that fails is logged: it does not end the run."""
        if self._dumps >= self._settings.max_step_dumps:
            logger.warning("step %d is bad (%s)", report.step, _words(bad))
            return
        self._dumps += 1
        folder = self._trainer.folder / FOLDER / f"step_{report.step}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._write(folder, report, bad)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            logger.error("step %d is bad (%s); it could not be dumped: %s", report.step, _words(bad), error)
            return
        self._dumped = folder
        logger.error("step %d is bad (%s); inspect it with: verl replay %s", report.step, _words(bad), folder)

    def _write(self, folder: Path, report: "StepReport", bad: dict[str, float]) -> None:
        trainer, roles = self._trainer, list(dict.fromkeys(map(_role, bad)))
        state = {
            "format": 1,
            "step": report.step,
            "bad": bad,
            "metrics": {name: float(value) for name, value in report.metrics.items()},
            "roles": roles,
            "weights": {role: self._weights(role, folder, bad) for role in roles},
            "writers": {column: op.name for op in trainer.pipeline.operators for column in op.writes},
            "batch": report.batch,
            "total_steps": trainer.total_steps,
            "working_dir": str(trainer.run.working_dir),
        }
        save_state(state, folder, "step")
        (folder / "config.yaml").write_text(dump_config(trainer.config, redact=True), encoding="utf-8")

    def _weights(self, role: str, folder: Path, bad: dict[str, float]) -> dict[str, Any]:
        """Where the weights of a role are, and whether they are those of the bad updates.

        They are those after the step. If all its updates were skipped, nothing has changed. Broken weights are not
        written: the newest checkpoint has the last ones that were not.
        """
        prefixes = [name.partition("/")[0] for name in bad if _role(name) == role]
        if any(f"{prefix}/{BROKEN}" in bad for prefix in prefixes):
            saved, step = self._trainer.checkpointer.saved_path, self._trainer.checkpointer.saved_step
            unchanged = step == self._trainer.global_step - 1
            return {"path": None if saved is None else str(resolved(saved) / role), "unchanged": unchanged}
        group: WorkerGroup = self._trainer.roles[role]
        group.save_weights(folder / role)
        self._trainer.tokenizer.save_pretrained(folder / role / "huggingface")
        return {"path": role, "unchanged": all(bad[f"{prefix}/{SKIPPED}"] == 1 for prefix in prefixes)}


def _role(metric: str) -> str:
    prefix = metric.partition("/")[0]
    return _ROLES.get(prefix, prefix)


def _words(bad: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in bad.items())


def roll_back(trainer: "Trainer", error: BaseException) -> bool:
    """After bad steps, rewind once, and continue with the prompts after theirs.

    Returns:
        Whether the run continues. If not, a note of the error says why.
    """
    asked_to_end = trainer.interruption.requested is not None
    if asked_to_end or not isinstance(error, BadStepsError) or trainer.config.trainer.on_bad_steps != "rollback":
        return False
    checkpointer, failed = trainer.checkpointer, trainer.global_step
    if checkpointer.rollbacks or checkpointer.saved_path is None:
        reason = "the run has rolled back once already" if checkpointer.rollbacks else "there is no checkpoint yet"
        error.add_note(f"trainer.on_bad_steps=rollback: {reason}")
        return False
    # the first operator is the source, which may have a queue of prompts (dynamic sampling)
    source = trainer.pipeline.operators[0].stateful or trainer.source
    position = source.state_dict()
    trainer.rewind()
    source.load_state_dict(position)
    checkpointer.rollbacks += 1
    logger.warning(
        "%s. Rolled back from step %d to step %d; the prompts of the steps in between are not used again",
        *(error, failed, trainer.global_step),
    )
    return True
