"""stdout and stderr that cannot write: another encoding, a reader that has ended, closed files."""

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from verl.utils.redaction import console_text, redact_text


class OutputError(Exception):
    """stdout cannot be written, for a reason other than a reader that has ended.

    Not an OSError, because argparse ignores those.
    """


@contextlib.contextmanager
def command_output() -> Iterator[None]:
    """Around a command, or as the decorator of its function: `prepare_streams`, and no output is lost silently.

    A reader of stdout or stderr that has ended (`| head`) does not change the command: the rest of the output is
    dropped.

    Raises:
        SystemExit: with status 1, and a line on stderr, if stdout cannot be written. Log lines do not count:
            their handler reports the error.
    """
    prepare_streams()
    try:
        yield
    except OutputError as error:
        lost: OutputError | None = error
        drop_pending(sys.stdout)
    except SystemExit:
        lost = _unwritten()
        if lost is None:
            raise
    except BaseException as error:
        if (lost := _unwritten()) is not None:
            error.add_note(f"stdout cannot be written: {lost}")
        raise
    else:
        lost = _unwritten()
    if lost is not None:
        print(f"error: stdout cannot be written: {lost}", file=sys.stderr)
        raise SystemExit(1) from None


def _unwritten() -> OutputError | None:
    """Flush stdout. Returns the error if that fails; the output is dropped then."""
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OutputError as error:
        drop_pending(sys.stdout)
        return error
    return None


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
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # not those of a notebook or a test, nor a stream that is prepared already
        if stream is getattr(sys, f"__{name}__") and type(stream) is io.TextIOWrapper and not stream.closed:
            setattr(sys, name, _prepared(stream))


class _Output(io.FileIO):
    """The file of stdout or stderr. What cannot be written to stderr is dropped: there is no other place for it."""

    dropping = False

    def write(self, data: Any) -> int | None:
        if self.dropping:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                stop_writing(self)
            elif self.fileno() == 1:
                raise OutputError(error.strerror) from None
            return len(data)


def _prepared(stream: io.TextIOWrapper) -> TextIO:
    stream.flush()
    file = _Output(stream.fileno(), "wb", closefd=False)
    buffer = file if stream.write_through else io.BufferedWriter(file)
    settings = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, **settings)


def drop_pending(stream: Any) -> None:
    """Drop what is written to a prepared stream, but not flushed."""
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)
    if isinstance(file, _Output) and not stream.closed:
        file.dropping = True
        stream.flush()
        file.dropping = False


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
    """Print a text of the data or of custom code: without secrets, control characters escaped, and no error if stdout
    cannot be written, which must not end a run."""
    try:
        print(console_text(text), end="")
    except BrokenPipeError:
        stop_writing(sys.stdout)
    except (OSError, ValueError, OutputError):
        drop_pending(sys.stdout)


def redact_output() -> None:
    """Replace secrets in each text that code of this process writes to stdout or stderr: in processes of the library
    that run code of the user. Bytes, and what programs write that it starts, stay as they are."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.write = functools.partial(_write_redacted, stream.write)


def _write_redacted(write: Callable[[str], int], text: str) -> int:
    write(redact_text(text))
    return len(text)


class BoundedText(io.TextIOBase):
    """In a helper process, stdout and stderr of functions of the user: `keep` gets the first characters.

    Handlers of `logging` keep the stream with which they were created, so it is the same for all calls. Subprocesses
    that inherit it write to the stdout of the process.
    """

    encoding, errors = "utf-8", "replace"

    def __init__(self, limit: int):
        # numbers of characters that are kept from here on, and that were not kept
        self.remaining, self.dropped = limit, 0
        self.buffer = _TextBytes(self)

    def keep(self, text: str) -> None:
        raise NotImplementedError

    def write(self, text: str) -> int:
        kept = text[: self.remaining]
        self.remaining -= len(kept)
        self.dropped += len(text) - len(kept)
        if kept:
            self.keep(kept)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def close(self) -> None:
        """Do nothing: the next call writes to the same stream."""


class _TextBytes(io.RawIOBase):
    """The `buffer` of a text stream."""

    def __init__(self, text: io.TextIOBase):
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self._text.write(bytes(data).decode(errors="replace"))
        return len(data)
