"""Console output of the logger "verl"."""

import functools
import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler


@functools.cache
def console() -> Console:
    """The console shared by log lines and live displays, so that they do not overwrite each other."""
    return Console()


class _PlainFormatter(logging.Formatter):
    """`12:03:44 [gen] 1.24s`; includes the level if it is not INFO."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")
        self._with_level = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record) if record.levelno == logging.INFO else self._with_level.format(record)


def setup_logging(level: int | str | None = None) -> None:
    """Log to the console: colored on a terminal, plain lines otherwise.

    A program that has configured logging keeps its handlers. Calling this again only changes the level.

    Args:
        level: level of the logger "verl". None keeps a level that is already set, otherwise uses VERL_LOGGING_LEVEL,
            otherwise INFO.
    """
    logger = logging.getLogger("verl")
    if level is not None or logger.level == logging.NOTSET:
        logger.setLevel(level if level is not None else os.environ.get("VERL_LOGGING_LEVEL", "INFO"))
    if logger.hasHandlers():
        return
    if console().is_terminal:
        handler: logging.Handler = RichHandler(console=console(), show_path=False, log_time_format="%H:%M:%S")
    else:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(_PlainFormatter())
    logger.addHandler(handler)


def setup_worker_logging(rank: int) -> None:
    """Log to the console from a worker process.

    INFO is logged by rank 0 only, since all ranks of a role would log the same; warnings are logged by every rank.
    """
    quiet = rank > 0 and "VERL_LOGGING_LEVEL" not in os.environ
    setup_logging(logging.WARNING if quiet else None)
