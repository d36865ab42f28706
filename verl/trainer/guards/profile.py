"""ProfiledSteps: traces of `trainer.profile_steps`, one per process, written by torch.profiler."""

import logging

from verl.config.fields import Schema
from verl.single_controller import WorkerGroup
from verl.trainer.guards.base import Guard
from verl.trainer.view import RunView, StepReport

logger = logging.getLogger("verl.trainer")


class ProfiledSteps(Guard):
    """Lets every process of the workers record these steps, into the folder `profile` of the run."""

    def __init__(self, config: Schema):
        self._steps = frozenset(config.trainer.profile_steps or ())
        self._is_recording = False

    def at_start(self, view: RunView) -> None:
        late = sorted(step for step in self._steps if step > view.total_steps)
        if late:
            logger.warning("trainer.profile_steps: the run ends at step %d, before %s", view.total_steps, late)

    def before_step(self, view: RunView) -> None:
        if view.step + 1 in self._steps:
            self._is_recording = True
            for group in _groups(view).values():
                group.start_profile()

    def after_step(self, view: RunView, report: StepReport) -> None:
        if self._is_recording:
            self._is_recording, folder = False, view.folder / "profile"
            for role, group in _groups(view).items():
                group.stop_profile(str(folder / f"step_{report.step}_{role}"))
            logger.info("step %d: traces of all processes in %s (https://ui.perfetto.dev)", report.step, folder)

    def at_end(self, view: RunView) -> None:
        """After a step that failed, end the recording of this process; other processes end, or start another."""
        for group in _groups(view).values() if self._is_recording else ():
            if group.processes is None:
                group.stop_profile(None)


def _groups(view: RunView) -> dict[str, WorkerGroup]:
    """One role of each set of processes, and its group."""
    groups = {group.processes: (role, group) for role, group in reversed(view.roles.items())}
    return dict(groups.values())
