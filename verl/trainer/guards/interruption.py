"""SIGINT and SIGTERM during training: the step in flight is finished and saved before the run ends.

The first signal is only recorded, in `RunView.interrupted`. A step that would generate again after it is undone. A
second SIGINT raises `Stopped` at once. A SIGINT within `REPEAT_SECONDS` of the first signal counts as the same request,
and further SIGTERMs are ignored, because launchers repeat them. Handlers are installed before the first step, in the
main thread only; in another thread nothing changes.
"""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from verl.config.fields import Schema
from verl.trainer.guards.base import SKIP, Action, Guard
from verl.trainer.view import RunView

logger = logging.getLogger("verl.trainer")

#: wrappers such as `timeout` send a signal to the process and again to its group
REPEAT_SECONDS = 0.5


class Stopped(KeyboardInterrupt):
    """A run was ended by SIGINT or SIGTERM.

    Attributes:
        signal: which one.
        finished: the step in flight was finished, and saved if trainer.save_at_end is set.
        second: it was the second signal, which ends the run at once.
    """

    def __init__(self, number: int, finished: bool = False, second: bool = False):
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)
        self.finished = finished
        self.second = second

    @property
    def exit_status(self) -> int:
        """128 + signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal


class UnfinishedStep(Exception):
    """A step was undone after SIGINT or SIGTERM, since it needed further samples."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise `Stopped` while the block runs, as SIGINT raises KeyboardInterrupt. Main thread only."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        yield
        return
    previous = signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


class Interruption(Guard):
    """Records SIGINT and SIGTERM."""

    def __init__(self, config: Schema):
        self._saves = config.trainer.save_at_end
        self._previous: dict[int, Any] = {}  # signal -> its handler before
        self._received = 0.0

    def before_step(self, view: RunView) -> None:
        self._view = view
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as in a background job of a shell
                self._previous[number] = signal.signal(number, self._receive)

    def on_error(self, view: RunView, error: BaseException) -> Action | None:
        if not isinstance(error, UnfinishedStep):
            return None
        logger.warning("step %s is not finished, because it needs further samples: a resumed run repeats it", error)
        return SKIP

    def at_end(self, view: RunView) -> None:
        for number, handler in self._previous.items():
            # None: a handler that was not installed from Python, which cannot be restored
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        view = self._view
        if view.interrupted is None:
            view.interrupted, self._received = signal.Signals(number), time.monotonic()
            step = f"step {view.step} of {view.total_steps}{' and saving it' * self._saves}"
            again = "a second Ctrl-C" if number == signal.SIGINT else "Ctrl-C"
            logger.warning("%s: finishing %s; %s stops at once", view.interrupted.name, step, again)
        elif number == signal.SIGINT and time.monotonic() - self._received >= REPEAT_SECONDS:
            raise Stopped(number, second=view.interrupted == signal.SIGINT)
