"""Bad steps: steps with a skipped update, or whose update broke the weights. They are logged, counted, and end the run.

A bad step is not saved, so that a run never resumes from one. After `trainer.max_skipped_steps` bad steps in a row, or
at once if the weights are broken, the run stops or, with `trainer.on_bad_steps=rollback`, returns once to its last
checkpoint and continues with the prompts after the bad ones (as Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
"""

import logging

from verl.config.fields import Schema
from verl.trainer.guards.base import ROLL_BACK, SKIP, Action, Guard
from verl.trainer.state.checkpointing import BadStepsError
from verl.trainer.view import RunView, StepReport

logger = logging.getLogger("verl.trainer")

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
