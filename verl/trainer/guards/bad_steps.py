"""Bad steps: steps with a skipped update, or whose update broke the weights. They are dumped, counted, and end the run.

A bad step is not saved, so that a run never resumes from one. After `trainer.max_skipped_steps` bad steps in a row, or
at once if the weights are broken, the run stops or, with `trainer.on_bad_steps=rollback`, returns once to its last
checkpoint and continues with the prompts after the bad ones (as Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from verl.config import dump_config
from verl.config.fields import Schema
from verl.trainer.guards.base import ROLL_BACK, SKIP, Action, Guard
from verl.trainer.state.checkpointing import BadStepsError
from verl.trainer.state.saved_state import save_state
from verl.trainer.view import RunView, StepReport
from verl.utils.paths import resolved

logger = logging.getLogger("verl.trainer")

FOLDER = "bad_steps"
SKIPPED, BROKEN = "grad_skipped", "broken_tensors"
#: prefix of a metric -> the role that reports it, where they differ
_ROLES = {"train": "actor"}


class BadSteps(Guard):
    """Counts and dumps the bad steps of a run."""

    def __init__(self, config: Schema):
        self._settings = config.trainer
        self._dumps = 0
        self._dumped: Path | None = None  # the newest dump
        self._in_a_row = 0  # bad steps since the last good one
        self._last_step = 0

    def after_step(self, view: RunView, report: StepReport) -> Action | None:
        """Count and dump a bad step. Raises BadStepsError if the run cannot continue after it."""
        bad = {name: value for name, value in report.metrics.items() if name.endswith((SKIPPED, BROKEN)) and value > 0}
        follows, self._last_step = report.step == self._last_step + 1, report.step  # False: the run was rewound
        self._in_a_row = self._in_a_row * follows + 1 if bad else 0
        if not bad:
            return None
        self._dump(view, report, bad)
        checkpointer, limit = view.checkpointer, self._settings.max_skipped_steps
        for name in bad:
            if name.endswith(BROKEN):
                checkpointer.wait()
                checkpointer.require_finite(_role(name), report.step)
        if 0 < limit <= self._in_a_row:
            checkpointer.wait()
            hint = f"; `verl replay {self._dumped}` shows the samples" if self._dumped is not None else ""
            raise BadStepsError(
                f"{limit} steps in a row had skipped updates ({_format_metrics(bad)} in step {report.step}): a "
                "gradient, a loss or a column of the batch was not finite. Look at the metrics of the steps before "
                f"(learning rate, KL, lengths). trainer.max_skipped_steps sets the limit (0: no limit){hint}; "
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

    def _dump(self, view: RunView, report: StepReport, bad: dict[str, float]) -> None:
        """Write what `verl replay` needs. A dump that fails is logged: it does not end the run."""
        description = f"step {report.step} is bad ({_format_metrics(bad)})"
        if self._dumps >= self._settings.max_step_dumps:
            logger.warning("%s", description)
            return
        self._dumps += 1
        folder = view.folder / FOLDER / f"step_{report.step}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _write(folder, view, report, bad)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            logger.error("%s; it could not be dumped: %s", description, error)
            return
        self._dumped = folder
        logger.error("%s; inspect it with: verl replay %s", description, folder)


def _write(folder: Path, view: RunView, report: StepReport, bad: dict[str, float]) -> None:
    roles = list(dict.fromkeys(map(_role, bad)))
    state = {
        "format": 1,
        "step": report.step,
        "bad": bad,
        "metrics": {name: float(value) for name, value in report.metrics.items()},
        "roles": roles,
        "weights": {role: _weights(view, role, folder, bad) for role in roles},
        "writers": {column: op.name for op in view.pipelines[0].operators for column in op.writes},
        "batch": report.batch,
        "total_steps": view.total_steps,
        "working_dir": str(view.run.working_dir),
    }
    save_state(state, folder, "step")
    (folder / "config.yaml").write_text(dump_config(view.config, redact=True), encoding="utf-8")


def _weights(view: RunView, role: str, folder: Path, bad: dict[str, float]) -> dict[str, Any]:
    """Where the weights of a role are, and whether they are those of the bad updates.

    They are those after the step. If all its updates were skipped, nothing has changed. Broken weights are not
    written: the newest checkpoint has the last ones that were not.
    """
    prefixes = [name.partition("/")[0] for name in bad if _role(name) == role]
    if any(f"{prefix}/{BROKEN}" in bad for prefix in prefixes):
        saved, step = view.checkpointer.saved_path, view.checkpointer.saved_step
        return {"path": None if saved is None else str(resolved(saved) / role), "unchanged": step == view.step - 1}
    view.roles[role].save_weights(folder / role)
    view.run.inputs.tokenizer.save_pretrained(folder / role / "huggingface")
    return {"path": role, "unchanged": all(bad[f"{prefix}/{SKIPPED}"] == 1 for prefix in prefixes)}


def _role(metric: str) -> str:
    prefix = metric.partition("/")[0]
    return _ROLES.get(prefix, prefix)


def _format_metrics(bad: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in bad.items())
