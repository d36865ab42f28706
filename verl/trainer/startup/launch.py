"""From a command line to a finished run. Setup errors end with one message instead of a traceback."""

import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.single_controller.worker_group import WorkerError
from verl.trainer.guards.early_stopping import NoMetricError
from verl.trainer.guards.interruption import Stopped, sigterm_raises
from verl.trainer.guards.mismatch import RolloutMismatchError
from verl.trainer.startup.command_line import USER_ERRORS, print_error, shell_command
from verl.trainer.startup.torchrun import launcher_settings
from verl.utils.disk import DiskError
from verl.utils.log import console, setup_logging, styled
from verl.utils.redaction import redact_text

if TYPE_CHECKING:
    from verl.trainer.base import Trainer


def dry_run(build: Callable[[], Any], verbose: bool = False) -> int:
    """Run all checks, print their number (verbose: their names) and the plan, and stop before workers start. Returns
    the exit status. build: makes what has `passed_checks()`, the names of the checks, and `plan()`, the run in one
    paragraph."""
    setup_logging()
    try:
        command = build()
    except USER_ERRORS as error:
        return print_error(error)
    passed = command.passed_checks()
    short = [f"{len(passed)} checks (--verbose: their names)"]
    print("\n".join(f"ok  {line}" for line in (passed if verbose else short)))
    plan = styled(command.plan())
    console().print(plan, soft_wrap=True) if console().is_terminal else print(plan.plain)
    return 0


def fit(trainer: "Trainer") -> int:
    """Train. Returns the exit status; see `run`."""
    try:
        trainer.fit()
    except KeyboardInterrupt as stop:
        stop = stop if isinstance(stop, Stopped) else Stopped(signal.SIGINT)
        progress = trainer.progress_summary()
        progress = progress.replace("in step", "after step", 1) if stop.finished else progress
        ordinal = "a second " if stop.second else ""
        print(f"\nstopped by {ordinal}{stop.signal.name} {progress}", file=sys.stderr)
        return stop.exit_status
    except DiskError as error:
        return print_error(error)
    except (NoMetricError, RolloutMismatchError) as error:
        error.add_note(trainer.progress_summary())
        return print_error(error)
    except Exception as error:
        if not trainer.view.ready and isinstance(error, ValueError):
            return print_error(error)
        error.add_note(_failure_summary(trainer, error))
        raise
    return int(trainer.view.has_failed)


def run(build: Callable[[], Any], execute: Callable[[Any], int] = fit) -> int:
    """Build a command and execute it; a trainer is trained. Returns the exit status.

    User errors are found while building, before a model is loaded, or while the workers start: one message, status 1.
    The same holds for a disk that is full or not writable. Other errors keep their traceback. SIGINT (Ctrl-C) and
    SIGTERM end the run with status 130 and 143: after the step in flight, which is saved, or at once before the first
    step and at a second SIGINT. The message says from which checkpoint the run resumes.
    """
    setup_logging()
    with sigterm_raises():
        try:
            command = build()
        except USER_ERRORS as error:
            return print_error(error)
        return execute(command)


def _failure_summary(trainer: "Trainer", error: Exception) -> str:
    """The last lines of a run that failed: the cause, the checkpoint, and the command that resumes."""
    summary = f"the run failed {trainer.progress_summary()}"
    if isinstance(error, WorkerError):
        headline, _, checkpoint = summary.partition("; ")
        cause = str(error).partition("\n")[0].removesuffix("; states and stacks of all ranks:")
        summary = f"{headline}: {cause}\n{checkpoint}"
    command = _resume_command()
    if command is None or trainer.checkpointer.newest_of_run() is None:
        return summary
    if trainer.config.trainer.resume_mode == "disable":
        command += " trainer.resume_mode=auto"
    return f"{summary}:\n  {command}"


def _resume_command() -> str | None:
    """The command line of this process; None if it contains a secret, or is that of a launcher, which is unknown."""
    if launcher_settings():
        return None
    command = shell_command()
    return command if redact_text(command) == command else None
