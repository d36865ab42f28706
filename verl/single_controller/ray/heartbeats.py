"""Heartbeats of the actors of a pool: the controller asks for them while it waits.

An actor that does not respond has no thread that can run Python code. The state of its process is that of the operating
system, which another process of its node reads.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.processes.child import process_status

_ASK_SECONDS = 5.0  # between two heartbeats that are asked for
_STATUS_SECONDS = 15.0  # for a node to start a process that reads the state of another


class Heartbeats:
    """The time of the last response of each actor.

    Args:
        actors: Ray's handles, in rank order.
    """

    def __init__(self, actors: Sequence[Any]):
        self._actors = actors
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[ray.ObjectRef | None, float]] = {}  # rank -> heartbeat in flight, and its time
        self._heard: set[int] = set()

    def ask(self, now: float) -> None:
        """Collect the heartbeats that have arrived, and ask for the next ones. Does not wait."""
        with self._lock:
            for rank, actor in enumerate(self._actors):
                ref, asked_at = self._requests.get(rank, (None, now - _ASK_SECONDS))
                if ref is not None and ray.wait([ref], timeout=0)[0]:
                    self._heard.add(rank)
                    ref = None
                if ref is None and now - asked_at >= _ASK_SECONDS:
                    ref, asked_at = actor.beat.options(concurrency_group="control").remote(), now
                self._requests[rank] = ref, asked_at

    def heard(self, rank: int) -> None:
        """Record that an actor has responded."""
        with self._lock:
            self._heard.add(rank)
            self._requests.pop(rank, None)

    def silence(self, rank: int) -> float | None:
        """Seconds since an actor stopped responding; None if it never has responded, and was not asked."""
        with self._lock:
            ref, asked_at = self._requests.get(rank, (None, 0.0))
            if ref is None:
                return 0.0 if rank in self._heard else None
            return time.monotonic() - asked_at

    def status(self, node: str, pid: int) -> str | None:
        """The state of a process, as in psutil, which a process of its node reads; None without a response."""
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(process_status).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        with contextlib.suppress(RayError):
            return ray.get(task.remote(pid), timeout=_STATUS_SECONDS)
        return None
