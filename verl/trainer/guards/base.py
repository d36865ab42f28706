"""The contract of a guard: an observer of a run that may end, undo or repeat its steps."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.registry import load_object

if TYPE_CHECKING:  # this module is imported before torch
    from verl.trainer.view import RunView, StepReport


@dataclass(frozen=True)
class Action:
    """What the run does next. reason: why, for a run that ends; failed: something is wrong."""

    name: str
    reason: str = ""
    failed: bool = False


#: No objection; the same as None.
CONTINUE = Action("continue")
#: After a step: do not save it; a checkpoint that is due follows the next step that is not skipped, and a validation is
#: only logged. After an error: the step is undone and does not count.
SKIP = Action("skip")
#: Return to the last checkpoint of the run, and continue with the prompts after those of the undone steps.
ROLL_BACK = Action("roll back")
#: End all workers, start new ones, and resume from the newest checkpoint.
RESTART = Action("restart")


def STOP(reason: str, *, failed: bool = False) -> Action:
    """End the run after this step, as at its last step: it is saved if trainer.save_at_end is set.

    failed: something is wrong, so the reason is logged as an error, and commands end with exit status 1.
    """
    return Action("stop", reason, failed)


class Guard:
    """Watches a run. Override what is needed; None, the default, is no objection.

        class StopAtNaN(Guard):
            def after_step(self, view, report):
                bad = [name for name, value in report.items() if math.isnan(value)]
                return STOP(f"{bad[0]} is NaN", failed=True) if bad else None

        trainer.guards.append(StopAtNaN())

    Guards are called in the order of `Trainer.guards`. Of an error, the first action counts; after a step, all do.
    """

    #: False in the constructor of a guard of `GUARDS`: the configuration switches it off, and it is never called
    is_on = True

    def at_start(self, view: "RunView") -> None:
        """The workers are started and the checkpoint is loaded. Called again after a restart or a rollback."""

    def before_step(self, view: "RunView") -> None:
        """Before each step of `fit`."""

    def after_step(self, view: "RunView", report: "StepReport") -> Action | None:
        """After the flow of a step has ended and its metrics are logged."""

    def after_validation(self, view: "RunView", metrics: dict[str, float]) -> Action | None:
        """After each validation of weights that no guard has skipped."""

    def on_error(self, view: "RunView", error: BaseException) -> Action | None:
        """After an error, also of the start. An error that is raised here replaces it for the guards that follow."""

    def at_end(self, view: "RunView") -> None:
        """The steps have ended, or are about to be repeated; also after an error."""


def load_callbacks(addresses: Iterable[str]) -> list[Guard]:
    """The callbacks at these addresses, `file.py:name`. A class is made without arguments. Raises ValueError if an
    address has another form, or names neither a Guard nor a function of (view, report)."""
    callbacks = []
    for address in addresses:
        path, _, name = address.rpartition(":")
        if not (path and name.isidentifier()):
            raise ValueError(f"trainer.callbacks: expected file.py:name or package.module:name, found {address!r}")
        callback = load_object(path, name)
        callback = callback() if inspect.isclass(callback) else callback
        if isinstance(callback, Guard):
            callbacks.append(callback)
            continue
        try:
            inspect.signature(callback).bind(None, None)
        except TypeError as error:
            form = "a Guard or a function of (view, report)"
            raise ValueError(f"trainer.callbacks: {address} is not {form}: {error}") from None
        guard = Guard()
        guard.after_step = callback
        callbacks.append(guard)
    return callbacks


class GuardRequest(RuntimeError):
    """A guard has asked for a rollback or a restart after a step."""

    def __init__(self, guard: Guard, action: Action, step: int):
        super().__init__(f"{type(guard).__name__}: {action.name} after step {step}")
        self.action = action


def ask(guards: Iterable[Guard], view: "RunView", hook: str, *args: Any) -> list[Action | None]:
    """Call a hook of all guards. Returns their actions; raises GuardRequest for ROLL_BACK and RESTART."""
    actions = []
    for guard in guards:
        actions.append(_call(guard, view, hook, *args))
        if actions[-1] in (ROLL_BACK, RESTART):
            raise GuardRequest(guard, actions[-1], view.step)
    return actions


def decide(guards: Iterable[Guard], view: "RunView", error: BaseException) -> tuple[Action | None, BaseException]:
    """Ask the guards about an error. Returns the first action, and the error or what a guard has replaced it by."""
    if isinstance(error, GuardRequest):
        return error.action, error
    for guard in guards:
        try:
            action = _call(guard, view, "on_error", error)
        except BaseException as other:
            error, action = other, None
        if action is not None:
            return action, error
    return None, error


def _call(guard: Guard, view: "RunView", hook: str, *args: Any) -> Action | None:
    """Call a hook. The reason of STOP is noted."""
    action = getattr(guard, hook)(view, *args)
    if action is None or action is CONTINUE:
        return None
    if not isinstance(action, Action):
        raise ValueError(f"{type(guard).__name__}.{hook} returned {action!r}, expected None or an Action")
    view.stop_reason = action.reason or view.stop_reason
    view.has_failed |= action.failed
    return action
