"""Output of worker processes on a terminal with a live panel: printed above the panel instead of through it."""

import os
import threading

from rich.text import Text

from verl.utils import log
from verl.utils.redaction import printable


def relay() -> int | None:
    """Start a thread that prints the lines of a pipe until all its writers are closed.

    Returns:
        The descriptor to write to, which the caller closes; None if the console has no panel, and a worker can keep the
        output of this process.
    """
    if not log.is_live(log.console()):
        return None
    reader, writer = os.pipe()
    threading.Thread(target=_print_lines, args=(reader,), name="output of workers", daemon=True).start()
    return writer


def _print_lines(reader: int) -> None:
    with open(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            log.console().print(Text(printable(Text.from_ansi(line.rstrip("\n")).plain)), soft_wrap=True)
