"""Waits of tests that fail instead of lasting for ever."""

import time
from collections.abc import Callable

import psutil


def wait_until(reached: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def gone(pid: int, within: float = 20) -> bool:
    """Whether a process ends within some seconds (a zombie has ended)."""
    deadline = time.monotonic() + within
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
