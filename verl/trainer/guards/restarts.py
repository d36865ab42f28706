"""Restarts: a run whose workers are lost continues from its newest checkpoint (`trainer.max_restarts`).

A restart does what running the same command again does: it ends all workers, starts new ones and loads the newest
checkpoint that is complete, so its results are those of a run that was resumed by hand. An error that appears twice in
the same step is not an accident, and ends the run.

Bad steps: steps with a skipped update, or whose update broke the weights. They are logged, counted, and end the run.

A bad step is not saved, so that a run never resumes from one. After `trainer.max_skipped_steps` bad steps in a row, or
at once if the weights are broken, the run stops or, with `trainer.on_bad_steps=rollback`, returns once to its last
checkpoint and continues with the prompts after the bad ones (as Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
"""

import logging
import re

from verl.config.fields import Schema
from verl.single_controller.worker_group import NodeLost, WorkerDied, WorkerError, WorkerTimeout
from verl.tracking.run_record import collected
from verl.trainer.guards.base import RESTART, ROLL_BACK, SKIP, Action, Guard
from verl.trainer.guards.operator_watch import OperatorTimeout
from verl.trainer.state.checkpointing import BadStepsError
from verl.trainer.view import RunView, StepReport

logger = logging.getLogger("verl.trainer")

_LOST = (WorkerError, OperatorTimeout)
_LOST_AT_START = (WorkerDied, WorkerTimeout)  # other errors at the first start are wrong settings


class Restarts(Guard):
    """Restarts a run that has lost a worker."""

    def __init__(self, config: Schema):
        self._limit = config.trainer.max_restarts
        self.is_on = self._limit > 0
        self._seen: set[tuple] = set()  # errors that have ended an attempt of this `fit`

    def on_error(self, view: RunView, error: BaseException) -> Action | None:
        if not isinstance(error, _LOST):
            return None
        obstacle = self._obstacle(view, error)
        if obstacle is None:
            return RESTART
        error.add_note(f"no restart: {obstacle}")
        return None

    def _obstacle(self, view: RunView, error: Exception) -> str | None:
        """Why the run does not restart after an error; None if it does."""
        if view.restarts == 0:
            self._seen.clear()
        signature = view.attempted_step, type(error), re.sub(r"\d+", "N", str(error).partition("\n")[0])
        is_repeated = signature in self._seen and not isinstance(error, NodeLost)
        self._seen.add(signature)
        if view.interrupted is not None:
            return f"{view.interrupted.name} was received"
        if view.restarts >= self._limit:
            return f"trainer.max_restarts is {self._limit}"
        if not view.ready and not isinstance(error, _LOST_AT_START):
            return "the run had not started"
        if is_repeated:
            return f"the same error has ended step {view.attempted_step} before"
        if not view.checkpointer.can_rewind:
            return "there is no checkpoint"
        return None


def log_restart(view: RunView, error: BaseException) -> None:
    """Log a restart, also into the record of the run that begins: that of the run that ended has been closed."""
    trainer = view.config.trainer
    with collected(view.run.warnings):
        logger.warning(
            "restart %d of %d after an error in step %d, from %s, with %d processes: %s",
            *(view.restarts, trainer.max_restarts, view.attempted_step),
            view.checkpointer.newest_of_run() or "the start",
            trainer.nnodes * trainer.n_gpus_per_node,
            str(error).partition("\n")[0],
        )


def settings_for_devices_left(view: RunView, error: BaseException) -> Schema:
    """The settings of a run for the devices that are left after an error (trainer.allow_smaller). Raises the error if
    the settings do not allow any smaller number of devices."""
    run, trainer = view.run, view.config.trainer
    size = trainer.nnodes, trainer.n_gpus_per_node
    sizes_left = run.cluster.sizes_left(*size)
    if sizes_left[:1] == [size]:
        return run.config
    for nnodes, per_node in sizes_left:
        resized = {"nnodes": nnodes, "n_gpus_per_node": per_node}
        config = run.config.model_copy(update={"trainer": trainer.model_copy(update=resized)})
        try:
            run.check_other(config)
        except ValueError as reason:
            error.add_note(f"{nnodes} nodes with {per_node} processes are not possible: {reason}")
            continue
        logger.warning(
            "the run continues with %d x %d instead of %d x %d devices, since the others are lost "
            "(trainer.allow_smaller=true)",
            *(nnodes, per_node, *size),
        )
        return config
    error.add_note("no restart: the devices that are left are not sufficient")
    raise error


# ---- bad steps ------------------------------------------------------------------------------------------------------


SKIPPED, BROKEN = "grad_skipped", "broken_tensors"


class BadSteps(Guard):
    """Counts the bad steps of a run."""

    def __init__(self, config: Schema):
        self._settings = config.trainer
        self._in_a_row = 0  # bad steps since the last good one
        self._last_step = 0

    def after_step(self, view: RunView, report: StepReport) -> Action | None:
        """Count a bad step. Raises BadStepsError if the run cannot continue after it."""
        bad = {name: value for name, value in report.metrics.items() if name.endswith((SKIPPED, BROKEN)) and value > 0}
        follows, self._last_step = report.step == self._last_step + 1, report.step  # False: the run was rewound
        self._in_a_row = self._in_a_row * follows + 1 if bad else 0
        if not bad:
            return None
        logger.error("step %d is bad (%s)", report.step, _format_metrics(bad))
        checkpointer, limit = view.checkpointer, self._settings.max_skipped_steps
        for name in bad:
            if name.endswith(BROKEN):
                checkpointer.wait()
                role = name.partition("/")[0]
                checkpointer.require_finite("actor" if role == "train" else role, report.step)
        if 0 < limit <= self._in_a_row:
            checkpointer.wait()
            raise BadStepsError(
                f"{limit} steps in a row had skipped updates ({_format_metrics(bad)} in step {report.step}): a "
                "gradient, a loss or a column of the batch was not finite. Look at the metrics of the steps before "
                "(learning rate, KL, lengths). trainer.max_skipped_steps sets the limit (0: no limit); "
                f"{checkpointer.newest()}"
            )
        return SKIP if limit else None

    def on_error(self, view: RunView, error: BaseException) -> Action | None:
        """After bad steps, roll back once. Otherwise, a note of the error says why not."""
        if not isinstance(error, BadStepsError) or self._settings.on_bad_steps != "rollback":
            return None
        if view.interrupted is not None:
            return None
        checkpointer = view.checkpointer
        if checkpointer.rollbacks or checkpointer.saved_path is None:
            reason = "the run has rolled back once already" if checkpointer.rollbacks else "there is no checkpoint yet"
            error.add_note(f"trainer.on_bad_steps=rollback: {reason}")
            return None
        return ROLL_BACK


def _format_metrics(bad: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in bad.items())
