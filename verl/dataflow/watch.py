"""A long operator is told from one that hangs: once a minute the log says what is still at work."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger("verl.dataflow")

EVERY = 60.0  # seconds


@contextmanager
def watched(under_way: Mapping[str, float]) -> Iterator[None]:
    """While the block runs, tell of the operators in `under_way` (name -> start by perf_counter) every minute."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(EVERY):
            for name, start in list(under_way.items()):
                logger.info("[%s] at work for %.0fs", name, time.perf_counter() - start)

    threading.Thread(target=tell, name="watch of the flow", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
