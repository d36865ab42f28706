"""Finds the rank that a call waits for, and the reason.

The state of a process is that of the operating system. A heartbeat is the sign of a rank that its Python code can run:
it stops if the process is stopped, and if C code holds the interpreter lock.
"""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import psutil

from verl.processes.limits import HEARTBEAT_SECONDS, Durations, Elapsed

logger = logging.getLogger("verl.single_controller")

SILENT_SECONDS = 30.0  # without a heartbeat, after which a rank is reported
_REPEAT_SECONDS = 60.0  # between two reports of a rank
_LOOK_SECONDS = 1.0  # between two looks at the ranks of a call

_WAITING_FUNCTIONS = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


@dataclass(frozen=True)
class RankState:
    """The observed state of a rank.

    Attributes:
        pid: Its process.
        status: State of the process, as in psutil; None if its host could not be asked.
        silent: Seconds since its last heartbeat; None before the first one.
        busy: Whether it has not replied to the call.
    """

    rank: int
    pid: int
    host: str
    status: str | None
    silent: float | None
    busy: bool = True

    @property
    def is_stopped(self) -> bool:
        return self.status == psutil.STATUS_STOPPED

    @property
    def is_suspect(self) -> bool:
        """Whether the process cannot work: it is stopped, has ended, or Python code does not run in it."""
        silent = self.silent is not None and self.silent >= SILENT_SECONDS
        return silent or self.status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    def __str__(self) -> str:
        silence, seconds = "", self.silent
        if seconds is not None:
            recent = seconds < 5 * HEARTBEAT_SECONDS
            silence = f", last heartbeat {seconds:.0f} s ago" if recent else f", no heartbeat for {seconds:.0f} s"
        return f"rank {self.rank} (process {self.pid}) {self._condition()}{silence}"

    def _condition(self) -> str:
        conditions: Mapping[str | None, str] = {
            psutil.STATUS_STOPPED: f"is stopped: SIGSTOP (`kill -CONT {self.pid}` continues it)",
            psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
            psutil.STATUS_ZOMBIE: "has ended and is a zombie",
            psutil.STATUS_DEAD: "has ended",
            psutil.STATUS_DISK_SLEEP: "is in an uninterruptible sleep: it waits for a disk, a network file system or a "
            "device",
            psutil.STATUS_RUNNING: "is running",
            None: "is in an unknown state, since its host does not respond",
        }
        return conditions.get(self.status, f"is {self.status}")


class CallWatch:
    """Looks at the ranks of the call `role`.`method`() while it runs, and logs those that cannot work.

    Args:
        durations: Of earlier calls.
        operator: The operator that makes the call; None for other calls.

    Attributes:
        limit: Of the call; for the constructors of workers, that of their start.
    """

    def __init__(self, durations: Durations, role: str, method: str, operator: str | None):
        self.elapsed = Elapsed()  # since the call started
        self._durations, self._name = durations, None if operator is None else (operator, role, method)
        self.limit = durations.start_limit if method == "__init__" else durations.limit(self._name)
        self._operator = "" if operator is None else f" in operator {operator!r}"
        self._call = f"{role}.{method}(){self._operator}"
        self._looked = 0.0
        self._stopped: dict[int, float] = {}  # rank -> since when it is stopped
        self._reported: dict[int, float] = {}  # rank -> when it was logged

    @property
    def is_due(self) -> bool:
        """Whether it is time for another look."""
        return self.elapsed.seconds - self._looked >= _LOOK_SECONDS

    def look(self, states: Sequence[RankState]) -> bool:
        """Log those of the ranks that have not replied that cannot work. Returns whether one has been stopped for too
        long."""
        now = self._looked = self.elapsed.seconds
        self._stopped = {s.rank: self._stopped.get(s.rank, now) for s in states if s.is_stopped}
        for state in states:
            last = self._reported.get(state.rank, -_REPEAT_SECONDS)
            silent = state.silent is None or state.silent >= SILENT_SECONDS
            if state.is_suspect and silent and now >= SILENT_SECONDS and now - last >= _REPEAT_SECONDS:
                self._reported[state.rank] = now
                limit = f"limit: {self.limit.seconds:.0f} s"
                logger.warning("%s has run for %.0f s (%s): %s", self._call, now, limit, state)
        limits = self._durations.limits
        return limits.factor is not None and any(now - since >= limits.minimum for since in self._stopped.values())

    def record(self, seconds: float) -> None:
        """Record the duration of the call, for the limits of later ones."""
        if self._name is not None:
            self._durations.record(self._name, seconds)

    def no_reply_message(self, waited: str, late: Sequence[int], replied: Collection[int]) -> str:
        replies = f"replied: {sorted(replied) or 'none'}; limit: {self.limit.reason}"
        return f"no reply after {waited} from ranks {late} ({replies}){self._operator}"


def find_culprit(states: Sequence[RankState], stacks: Mapping[int, str]) -> tuple[RankState, str]:
    """The rank that the others wait for, and a description of its state."""
    suspects = [state for state in states if state.is_suspect]
    late = [state for state in states if state.busy] or list(states)
    if suspects:
        return suspects[0], "; ".join(map(str, suspects))
    asleep = [state for state in late if state.status == psutil.STATUS_DISK_SLEEP]
    if asleep:
        return asleep[0], "; ".join(map(str, asleep))
    waiting = [state for state in late if _is_in_collective(stacks.get(state.rank, ""))]
    if len(waiting) == len(late):
        ranks = [state.rank for state in waiting]
        return late[0], f"ranks {ranks} wait in a collective operation, and each process is alive: check the network"
    positions: dict[str | None, list[RankState]] = {}  # innermost function -> ranks in it; the culprit's differs
    for state in late:
        if state not in waiting:
            positions.setdefault(_innermost(stacks.get(state.rank, "")), []).append(state)
    position, (culprit, *_) = min(positions.items(), key=lambda item: len(item[1]))
    partners = f" while ranks {[state.rank for state in waiting]} wait in a collective operation" if waiting else ""
    return culprit, f"{culprit}{f', in {position}' if position else ''}{partners}"


def _call_frames(stacks: str) -> list[re.Match[str]]:
    """The frames of the thread that runs the call, innermost first."""
    for thread in re.split(r"\n\s*\n", stacks):
        frames = [match for line in thread.splitlines() if (match := _FRAME.search(line))]
        if any(frame["file"].endswith(("local/worker_main.py", "ray/rank_actor.py")) for frame in frames[1:]):
            return frames
    return []


def _innermost(stacks: str) -> str | None:
    """The innermost function of the call, as "name (file:line)"."""
    frames = _call_frames(stacks)
    return f"{frames[0]['name']} ({frames[0]['file']}:{frames[0]['line']})" if frames else None


def _is_in_collective(stacks: str) -> bool:
    return any(frame["file"].endswith(_WAITING_FUNCTIONS) for frame in _call_frames(stacks)[:4])
