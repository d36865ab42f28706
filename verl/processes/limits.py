"""Limits of waits, from measured durations.

    durations = Durations(Limits(timeout=3600, factor=10, minimum=120))
    durations.limit("gen").seconds       # 3600: it has not run yet
    durations.record("gen", 20.0)
    durations.limit("gen").seconds       # 200: 10 x the median

A fixed limit is too long for most operations and too short for others, and their durations are not known in advance.
"""

import statistics
import threading
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

_WINDOW = 101  # durations that count for the median, so that it follows responses that become longer


@dataclass(frozen=True)
class Limits:
    """Settings of waits, in seconds."""

    # limit of an operation that has not finished yet in this run, and the maximum of every limit
    timeout: float = 3600.0
    start: float | None = None  # limit of starting workers and loading models; None: `timeout`
    factor: float | None = None  # a limit is the median duration times this factor; None: always `timeout`
    minimum: float = 120.0  # the smallest of these limits
    # operator -> how long one of its calls may take by a separate setting, such as `reward.timeout`. A limit from its
    # median is longer by this, so that one slow call that is allowed does not end the run.
    call_limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Limit:
    """The limit of one wait."""

    seconds: float
    reason: str  # where it comes from, for a message


class Durations:
    """Durations of finished operations, by name. Can be used from several threads. A number as `limits` is the limit of
    every operation."""

    def __init__(self, limits: float | Limits):
        self.limits = limits if isinstance(limits, Limits) else Limits(limits)
        self._lock = threading.Lock()
        self._recorded: dict[Hashable, deque[float]] = {}

    def record(self, name: Hashable, seconds: float) -> None:
        with self._lock:
            self._recorded.setdefault(name, deque(maxlen=_WINDOW)).append(seconds)

    @property
    def start_limit(self) -> Limit:
        limits = self.limits
        return Limit(limits.timeout if limits.start is None else limits.start, "trainer.start_timeout")

    def limit(self, name: Hashable | None) -> Limit:
        """The limit of the next operation of this name; of None, `Limits.timeout`."""
        limits = self.limits
        with self._lock:
            recorded = list(self._recorded.get(name, ()))
        if limits.factor is None or name is None or not recorded:
            return Limit(limits.timeout, "trainer.worker_timeout")
        median = statistics.median(recorded)
        call_limit = limits.call_limits.get(_operator(name), 0.0)
        seconds = max(limits.factor * median, limits.minimum) + call_limit
        if seconds >= limits.timeout:
            return Limit(limits.timeout, "trainer.worker_timeout")
        reason = f"{limits.factor:g} x the median of {median:.3g} s, at least {limits.minimum:g} s"
        reason += f", and {call_limit:g} s for one call" if call_limit else ""
        return Limit(seconds, reason)


def _operator(name: Hashable) -> str:
    """The operator of a name, ("gen", role, method) or "validation: gen", without its flow."""
    return str(name[0] if isinstance(name, tuple) else name).rpartition(": ")[2]


class Elapsed:
    """Seconds of a wait, without those in which this process itself did not run (SIGSTOP, suspended job).

    `tick` is called again and again during the wait; a longer pause between two calls does not count.
    """

    def __init__(self, max_pause: float = 5.0):
        self.seconds = 0.0
        self._max_pause = max_pause
        self._last: float | None = None

    def tick(self, now: float) -> float:
        """Add the time since the last call. Returns the sum."""
        if self._last is not None:
            self.seconds += min(now - self._last, self._max_pause)
        self._last = now
        return self.seconds
