"""Warn if torch has more threads than there are free cores, which makes steps many times slower."""

import functools
import logging
import os

import torch

logger = logging.getLogger("verl.trainer")


def oversubscription(threads: int, load: float, cores: int) -> str | None:
    """Return the warning if the threads exceed the free cores, otherwise None.

    Args:
        threads: threads of torch in each operation.
        load: load average of the last minute, without this process.
        cores: cores of the machine.
    """
    free = max(cores - load, 0.0)
    if load < 1 or threads <= free + 0.5 or threads == 1:
        return None
    return (
        f"CPU oversubscription: load average {load:.1f} on {cores} cores, and torch uses {threads} threads, which can "
        f"make steps many times slower. Set OMP_NUM_THREADS={max(1, int(free))}"
    )


@functools.cache
def warn_if_oversubscribed() -> None:
    """Log the warning, once per process. Call it before workers start: their load is not that of other programs."""
    this_process = 1.0  # load of this process, which has been importing and tokenizing
    warning = oversubscription(
        torch.get_num_threads(), max(os.getloadavg()[0] - this_process, 0.0), os.cpu_count() or 1
    )
    if warning is not None:
        logger.warning("%s", warning)
