"""SIGINT and SIGTERM during training: the step in flight is finished and saved before the run ends.

    with Interruption() as interruption:
        while not interruption.requested:
            step()

The first signal is only recorded. A step that would generate again after it is undone (`end_unfinished`). A second
SIGINT raises `Stopped` at once. A SIGINT within `REPEAT_SECONDS` of the first signal counts as the same request, and
further SIGTERMs are ignored, because launchers repeat them. Handlers are installed in the main thread only; in another
thread nothing changes.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

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


class Interruption:
    """Records SIGINT and SIGTERM while it is entered.

    Args:
        what: returns what is finished before the run ends, for the message.

    Attributes:
        requested: the signal that was received; None before.
    """

    def __init__(self, what: Callable[[], str] = lambda: "the step in flight"):
        self.what = what
        self.requested: signal.Signals | None = None
        self._previous: dict[int, Any] = {}
        self._received = 0.0

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:  # as in a background job of a shell
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._previous.items():
            # None: a handler that was not installed from Python, which cannot be restored
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def end_unfinished(self, step: int) -> None:
        """Called before a step that lacks samples generates further ones. Raises UnfinishedStep after a signal."""
        if self.requested is not None:
            logger.warning("step %d is not finished, because it needs further samples: a resumed run repeats it", step)
            raise UnfinishedStep(step)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._received = signal.Signals(number), time.monotonic()
            again = "a second Ctrl-C" if number == signal.SIGINT else "Ctrl-C"
            logger.warning("%s: finishing %s; %s stops at once", self.requested.name, self.what(), again)
        elif number == signal.SIGINT and time.monotonic() - self._received >= REPEAT_SECONDS:
            raise Stopped(number, second=self.requested == signal.SIGINT)
