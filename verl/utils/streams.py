"""stdout and stderr that cannot write: another encoding, a reader that has ended, closed files."""

import contextlib
import os
import sys
from typing import Any

from verl.utils.redaction import printable


def prepare_streams() -> None:
    """Let stdin, stdout and stderr exist and take any text.

    Those that the process was started without (`>&-`) are /dev/null: otherwise files that it opens would have their
    numbers. Characters that an encoding does not have, such as é in ASCII, are written as escapes.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # the smallest free number is given to the file that is opened next
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    write_any_text()


def write_any_text() -> None:
    """Let stdout and stderr escape what their encoding does not have, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        # a notebook has streams of another kind, and one that is closed cannot be changed
        with contextlib.suppress(AttributeError, ValueError, OSError):
            if stream.errors in ("strict", "surrogateescape"):
                stream.reconfigure(errors="backslashreplace")


def stop_writing(stream: Any) -> None:
    """Drop what is written to a stream from here on: its reader has ended (`| head`)."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # it is no file
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def print_printable(text: str) -> None:
    """Print a text of the data or of custom code: control characters escaped, and no error if stdout cannot be written,
    which must not end a run."""
    try:
        print(printable(text), end="")
    except BrokenPipeError:
        stop_writing(sys.stdout)
    except (OSError, ValueError):
        return
