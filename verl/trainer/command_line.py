"""What programs have in common: `--config FILE.yaml key=value ...`, --print-config, --help; errors as one message."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.config.fields import Schema

#: what a user can get wrong before a run begins: settings, files, packages, code of one's own
MISTAKES = (ValueError, ImportError, SyntaxError, FileNotFoundError)


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str], set[str]]:
    """(config file, key=value overrides, flags) of a command line."""
    path, overrides, flags = None, [], set()
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--config", "-c"):
            path = next(rest, None)
            if path is None:
                raise ValueError("--config needs a file name after it")
        elif argument.startswith(("--config=", "config=")):
            path = argument.split("=", 1)[1]
        elif argument in ("--help", "-h", "--print-config"):
            flags.add(argument)
        else:
            overrides.append(argument)
    return path, overrides, flags


def command_line(
    arguments: list[str] | None,
    usage: str,
    settings: "Callable[[str | None, list[str]], Schema]",
    run: Callable[[str | None, list[str]], int],
) -> int:
    """Do what a command line asks for; the exit status.

    arguments: None for those of the process. usage: what --help shows. settings, run: given the file and the overrides,
    the configuration that --print-config shows, and the program itself, which answers for its own mistakes.
    """
    try:
        path, overrides, flags = split_arguments(sys.argv[1:] if arguments is None else arguments)
        if flags & {"--help", "-h"}:
            print(usage)
            return 0
        if "--print-config" in flags:
            from verl.config import dump_config

            print(dump_config(settings(path, overrides), everything=True))
            return 0
    except ValueError as error:
        return complain(error)
    try:
        return run(path, overrides)
    except KeyboardInterrupt:  # of a run that is under way `run` itself tells more
        print("\nstopped by SIGINT before anything was done", file=sys.stderr)
        return 130


def complain(error: Exception) -> int:
    """Print an error with its notes and without a stack; the exit status that goes with it."""
    notes = vars(error).get("__notes__", [])
    print("\n  ".join([f"error: {error}", *notes]), file=sys.stderr)
    return 1
