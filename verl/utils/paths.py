"""Paths and text files that users give. A path may be relative, a link, or start with `~`.

`Path.expanduser` raises RuntimeError for the home of an unknown user, `Path.resolve` for links that form a loop, and
opening a named pipe waits for a writer. These functions do not.
"""

import json
import os
from pathlib import Path
from typing import Any


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` replaced by the home folder."""
    return Path(os.path.expanduser(path))


def resolved(path: str | os.PathLike[str]) -> Path:
    """The absolute path with `~` expanded and links followed. Links that form a loop are kept."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def read_text(path: str | os.PathLike[str]) -> str:
    """The content of a text file.

    Raises:
        ValueError: there is no such file, it is not a regular file, or not text in UTF-8.
        OSError: it may not be read.
    """
    if not os.path.isfile(path):
        actual = "something else" if os.path.exists(path) else "nothing"
        raise ValueError(f"{os.fspath(path)}: expected a file, found {actual}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is not a text file in UTF-8: {error}") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value of a JSON file. Raises as `read_text`, and ValueError if it is not JSON."""
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)}: expected JSON: {error}") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, or into a named pipe that has a reader. Raises OSError if it may not be written."""
    # O_NONBLOCK: an error instead of a wait for the reader of a pipe
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
