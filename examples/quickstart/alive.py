"""Lines of a long phase, so that it does not look like a hang."""

import threading
import time
from collections.abc import Callable


class Alive:
    """Context manager that logs the current activity after `seconds` without another line, then after twice as many ...

        with Alive(print, lambda: "downloading the model"):
            download()                    # still running after 10 s: downloading the model

    Args:
        log: receives the lines, in another thread.
        seconds: between two lines; None: no lines.
    """

    def __init__(self, log: Callable[[str], object], activity: Callable[[], str], seconds: float | None = 10.0):
        self._log, self._activity, self._seconds = log, activity, seconds
        self._start = self._last = time.perf_counter()
        self._ended = threading.Event()
        self._ended.set()

    def reset(self) -> None:
        """Another line was printed: wait again."""
        self._last = time.perf_counter()

    def __enter__(self) -> "Alive":
        self._start = self._last = time.perf_counter()
        if self._seconds is not None:
            self._ended.clear()
            threading.Thread(target=self._run, name="alive", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(max(0.01, self._last + self._seconds - time.perf_counter())):
            if time.perf_counter() >= self._last + self._seconds:
                self.reset()
                self._seconds *= 2
                self._log(f"still running after {self._last - self._start:.0f} s: {self._activity()}")
