"""The log on the console: one place that decides how the lines of the logger "verl" look."""

import functools
import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler


@functools.cache
def console() -> Console:
    """The console that log lines and live displays share, so that neither writes into the other."""
    return Console()


class _PlainFormatter(logging.Formatter):
    """`12:03:44 [gen] 1.24s`; the level is named when it is not INFO."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")
        self._with_level = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record) if record.levelno == logging.INFO else self._with_level.format(record)


def setup_logging(level: int | str | None = None) -> None:
    """Show the log of this package on the console: coloured on a terminal, plain lines elsewhere.

    level: of the logger "verl"; None leaves one that is set already, else takes VERL_LOGGING_LEVEL, else INFO.
    A program that has configured logging itself keeps its own handlers; calling this again changes the level only.
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
    """Show the log of a worker process where its controller shows its own.

    All ranks of a role would say the same, so INFO comes from rank 0 alone; a warning may be about one rank.
    """
    quiet = rank > 0 and "VERL_LOGGING_LEVEL" not in os.environ
    setup_logging(logging.WARNING if quiet else None)
