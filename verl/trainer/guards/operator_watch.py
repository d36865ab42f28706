"""OperatorWatch: ends an operator of the controller that hangs, such as a reward function or a tool.

Calls of workers in other processes have limits of their own (`verl.single_controller`), and name the rank. The watch
covers the rest: its limit is that of the operator as a whole. It raises in the thread that runs the flow, so code in C
that holds the interpreter lock cannot be ended.

ProfiledSteps: traces of `trainer.profile_steps`, one per process, written by torch.profiler.
"""

import ctypes
import logging
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

from verl.config.fields import Schema
from verl.processes.limits import Durations
from verl.single_controller import WorkerGroup
from verl.single_controller.cluster import wait_limits
from verl.trainer.guards.base import Guard
from verl.trainer.view import RunView, StepReport

logger = logging.getLogger("verl.trainer")

_LOOK_SECONDS = 1.0
_MARGIN_SECONDS = 30.0  # a call of a worker reports its own limit first
_SIGNAL = signal.SIGUSR2


class OperatorTimeout(RuntimeError):
    """An operator has exceeded its limit."""


class _Interrupt(BaseException):
    """Raised in the operator: code of users that retries after any Exception does not catch it."""


def thread_stacks() -> str:
    """The stacks of the other threads of this process."""
    frames = sys._current_frames()
    return "\n".join(
        f"--- thread {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames and thread is not threading.current_thread()
    )


class OperatorWatch(Guard):
    """Watches the operators of all pipelines, except those of `RunView.unwatched`, which run in the thread that starts
    it. Their durations are kept over restarts."""

    def __init__(self, config: Schema):
        self._durations = Durations(wait_limits(config))
        self._seen: dict[str, float] = {}  # operator -> its last start that is recorded
        self._ended = threading.Event()
        self._message = ""
        self._late: tuple[str, float] = ("", 0.0)  # the operator that was ended last, and its start
        self._signal_handled = True  # by the flow thread
        self._handler: Any = None

    def at_start(self, view: RunView) -> None:
        self._view = view
        self._ended.clear()
        self._flow_thread = threading.current_thread()
        if self._flow_thread is threading.main_thread():
            self._handler = signal.signal(_SIGNAL, self._raise)
        self._watcher = threading.Thread(target=self._watch, name="operator watch", daemon=True)
        self._watcher.start()

    def on_error(self, view: RunView, error: BaseException) -> None:
        if isinstance(error, _Interrupt):
            raise OperatorTimeout(self._message) from None

    def at_end(self, view: RunView) -> None:
        self._ended.set()
        self._watcher.join()
        if self._flow_thread is threading.main_thread():
            # None: a handler that was not installed from Python, which cannot be restored
            signal.signal(_SIGNAL, signal.SIG_DFL if self._handler is None else self._handler)

    def _watch(self) -> None:
        source = self._view.pipelines[0].operators[0].name
        while not self._ended.wait(_LOOK_SECONDS):
            for pipeline in self._view.pipelines:
                for operator, (start, end) in dict(pipeline.spans).items():
                    name = pipeline.label + operator
                    if self._seen.get(name) != start:
                        self._seen[name] = start
                        # a batch that threads have prepared took longer than the wait for it
                        ahead = self._view.source.seconds_ahead if name == source else 0.0
                        self._durations.record(name, max(end - start, ahead))
            for name, start in self._view.running_operators().items():
                if name in self._view.unwatched:
                    continue
                if (name, start) == self._late:
                    if not self._signal_handled:  # it arrived just before a system call, which it does not interrupt
                        signal.pthread_kill(self._flow_thread.ident, _SIGNAL)
                    continue
                limit = self._durations.limit(name)
                if time.perf_counter() - start > limit.seconds + _MARGIN_SECONDS:
                    self._late = name, start
                    self._interrupt(name, f"{limit.seconds:g} s (limit: {limit.reason})")

    def _interrupt(self, name: str, limit: str) -> None:
        frame = sys._current_frames()[self._flow_thread.ident]
        location = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        self._message = f"operator {name!r} has not ended after {limit}: it is in {location}; stacks of all threads:"
        self._message += f"\n{thread_stacks()}"
        if self._flow_thread is threading.main_thread():
            self._signal_handled = False
            signal.pthread_kill(self._flow_thread.ident, _SIGNAL)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._flow_thread.ident), ctypes.py_object(_Interrupt)
            )

    def _raise(self, number: int, frame: FrameType | None) -> None:
        handled, self._signal_handled = self._signal_handled, True
        name, start = self._late
        if not handled and self._view.running_operators().get(name) == start:  # it has not ended at this moment
            raise _Interrupt


class ProfiledSteps(Guard):
    """Lets every process of the workers record these steps, into the folder `profile` of the run."""

    def __init__(self, config: Schema):
        self._steps = frozenset(config.trainer.profile_steps or ())
        self.is_on = bool(self._steps)
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
