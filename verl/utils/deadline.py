"""A watchdog: what hangs is named, with the stacks of all threads, instead of standing still in silence."""

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def all_stacks() -> str:
    """The stack of every Python thread of this process but a watchdog that asks, as text, the main thread first."""
    frames = sys._current_frames()
    if isinstance(threading.current_thread(), threading.Timer):
        del frames[threading.get_ident()]
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: (thread is not main, thread.name))
    parts = []
    for thread in threads:
        if thread.ident in frames:
            stack = "".join(traceback.format_stack(frames[thread.ident]))
            parts.append(f"--- thread {thread.name}\n{stack}")
    return "".join(parts)


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Log an error with the stacks of all threads when the block has run for `seconds`; `what` names it in the message.

    The block is not ended: a thread that waits in a collective or in a driver cannot be stopped from outside, so who
    started the process decides. When the block ends after all, the log says so and how long it took.
    """
    started = time.monotonic()
    reported = threading.Event()

    def report() -> None:
        reported.set()
        rank = os.environ.get("RANK", "0")
        logger.error(
            "%s has not finished after %g s (rank %s, pid %d on %s). Stacks of all threads:\n%s",
            what,
            seconds,
            rank,
            os.getpid(),
            socket.gethostname(),
            all_stacks(),
        )

    watchdog = threading.Timer(seconds, report)
    watchdog.name = f"deadline of {what}"
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        if reported.is_set():
            logger.warning("%s ended after %.1f s, its deadline was %g s", what, time.monotonic() - started, seconds)
