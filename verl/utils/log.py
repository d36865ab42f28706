"""Console output of the logger "verl"."""

import contextlib
import functools
import logging
import os
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl.processes.streams import OutputError, drop_pending, stop_writing, write_any_text
from verl.utils.redaction import console_text

#: the logger of the lines about steps. It has a separate level, so that a run with log level WARNING prints its steps
steps = logging.getLogger("verl.steps")
steps.setLevel(logging.INFO)


@functools.cache
def console() -> Console:
    """The console shared by log lines and live displays, so that they do not overwrite each other."""
    return Console()


def styled(text: str, style: str = "") -> Text:
    """A text for the console. What is between the marks of trained tokens (`SFTDataset.describe`) is green."""
    result = Text(console_text(text), style, overflow="fold")
    result.highlight_regex(r"\[train>.*?<train\]", "bold green")
    return result


def is_live(console: Console) -> bool:
    """Whether a console can redraw a panel in place: a terminal, but not CI, a notebook, or TERM=dumb."""
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and not console.is_jupyter
        and os.environ.get("CI", "").lower() not in ("1", "true")
    )


class _StreamHandler(logging.StreamHandler):
    """Writes lines to a stream. One that cannot be written does not end the run, and is reported once, on stderr."""

    _reported = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) + self.terminator
        except Exception:
            self.handleError(record)
            return
        try:
            self.stream.write(text)
            self.flush()
        except (OSError, ValueError, OutputError) as error:
            if isinstance(error, BrokenPipeError):
                stop_writing(self.stream)
            drop_pending(self.stream)
            if not self._reported and self.stream is not sys.stderr:
                self._reported = True
                with contextlib.suppress(AttributeError, ValueError, OSError):
                    sys.stderr.write(f"the log cannot be written to stdout: {type(error).__name__}: {error}\n")


class _PlainFormatter(logging.Formatter):
    """`12:03:44 [gen] 1.24s`; with the level if it is not INFO. Lines about steps have no time: they fill the width."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.name != steps.name:
            level = "" if record.levelno == logging.INFO else f"{record.levelname} "
            text = f"{self.formatTime(record, '%H:%M:%S')} {level}{text}"
        return console_text(text)


class _TerminalHandler(logging.Handler):
    """Prints the time and the message in two columns; a long message is wrapped in its column."""

    _STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = styled(self.format(record), self._STYLES.get(record.levelno, ""))
            if record.name == steps.name:
                console().print(message, soft_wrap=True)  # a command that is copied has no line breaks
                return
            if record.levelno != logging.INFO:
                message = Text.assemble((f"{record.levelname} ", "bold"), message)
            line = Table.grid(padding=(0, 1, 0, 0))
            line.add_row(Text(self.formatter.formatTime(record, "%H:%M:%S"), "dim"), message)
            console().print(line)
        except Exception:
            self.handleError(record)


def setup_logging(level: int | str | None = None) -> None:
    """Log to the console: with colors on a terminal, plain lines otherwise. A program that has configured logging keeps
    its handlers; calling this again only changes the level of the logger "verl". None keeps one that is set, otherwise
    uses VERL_LOGGING_LEVEL, otherwise INFO."""
    logger = logging.getLogger("verl")
    if level is not None or logger.level == logging.NOTSET:
        level = os.environ.get("VERL_LOGGING_LEVEL", "INFO") if level is None else level
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    if logger.hasHandlers():
        return
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries between the lines; downloads of the hub keep theirs
    write_any_text()
    if is_live(console()):
        handler: logging.Handler = _TerminalHandler()
    else:
        handler = _StreamHandler(sys.stdout)
        handler.setFormatter(_PlainFormatter())
    logger.addHandler(handler)


def announce_loading() -> None:
    """Log that torch and transformers are loaded next, which takes seconds; nothing if torch is loaded."""
    if "torch" not in sys.modules:
        setup_logging()
        logging.getLogger("verl").info("loading torch and transformers")


def setup_worker_logging(rank: int) -> None:
    """Log to the console from a worker process: INFO by rank 0 only, since all ranks of a role would log the same;
    warnings by every rank."""
    quiet = rank > 0 and "VERL_LOGGING_LEVEL" not in os.environ
    setup_logging(logging.WARNING if quiet else None)
