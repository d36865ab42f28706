"""Time limits for functions in the main thread, by an alarm signal. For slow functions, not for untrusted ones."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any


class DeadlineExceeded(BaseException):
    """The alarm of `interrupt_after`. Not an Exception, so that `except Exception` in user code does not catch it."""


@contextlib.contextmanager
def alarm() -> Iterator[Callable[[float, Callable[[], Any]], Any]]:
    """Yield a function `interrupt(seconds, call)`, which runs `call()` and raises DeadlineExceeded after `seconds`.

    Main thread only, since Python delivers signals there. The signal handler is set once for any number of calls. At
    the end a previous alarm is restored, with its remaining time.
    """
    limit: float | None = None  # of the running call

    def ring(signum, frame):
        if limit is not None:
            raise DeadlineExceeded(f"not done after {limit:g} s")

    def interrupt(seconds: float, call: Callable[[], Any]) -> Any:
        nonlocal limit
        limit = seconds
        try:
            # Repeated every second: a bare `except:` in user code swallows one alarm, not all of them.
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
            try:
                return call()
            finally:
                limit = None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield interrupt
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - start), 1e-3), interval)
