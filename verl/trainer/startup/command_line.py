"""The arguments of all programs, `--config FILE.yaml key=value ...`, and how they print errors."""

import argparse
import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from verl.utils.redaction import console_text

#: what a user can get wrong before a run starts: settings, files, packages, custom code
USER_ERRORS = (ValueError, ImportError, SyntaxError, OSError)

_FLAGS = ("--help", "-h", "--print-config", "--dry-run", "--verbose")

#: Hydra's options for a configuration file, and their short forms
_HYDRA = {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}
_HYDRA |= {name: name for name in _HYDRA.values()}


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str], set[str]]:
    """(config file, key=value overrides, flags) of a command line."""
    path, overrides, flags = None, [], set()
    hydra: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument in ("--config", "-c"):
            path = next(rest, None)
            if path is None:
                raise ValueError("--config requires a file name")
        elif argument.startswith(("--config=", "config=")):
            path = value
        elif name in _HYDRA:
            hydra[_HYDRA[name]] = value if equals else _next_of(name, rest)
        elif argument in _FLAGS:
            flags.add(argument)
        elif name == "--cfg":  # Hydra prints the configuration, or its own
            flags.add("--print-config")
            _ = equals or next(rest, None)
        elif argument in ("--multirun", "-m"):
            raise ValueError(f"{argument} is not supported: start one run per configuration")
        else:
            overrides.append(argument)
    if hydra and path is not None:
        raise ValueError(f"give --config {path} or {next(iter(hydra))}, not both")
    if not hydra:
        return path, overrides, flags
    path, selected = _hydra_config(hydra)
    return path, [*selected, *overrides], flags


def _next_of(name: str, rest: Iterator[str]) -> str:
    """The value of an option, which is the next argument. Raises ValueError if there is none."""
    value = next(rest, None)
    if value is None:
        raise ValueError(f"{name} requires a value")
    return value


def _hydra_config(options: dict[str, str]) -> tuple[str | None, list[str]]:
    """The file that Hydra's options name, and overrides; None for a configuration of public verl, whose values are the
    defaults of the schema, or an override that selects its keys."""
    from verl.config.public.hydra import CONFIGURATION, find_config
    from verl.config.public.upstream import upstream_selections

    directories = [options[name] for name in ("--config-path", "--config-dir") if name in options]
    name = options.get("--config-name", "").removesuffix(".yaml")
    file = find_config(options.get("--config-name"), directories)
    if file is not None:
        return str(file), []
    return None, [f"{CONFIGURATION}={name}"] if name in upstream_selections()[""] else []


def usage(text: str, program: str) -> str:
    """The --help of a program.

    Args:
        text: with `{program}` for the command.
        program: a module, which `python -m` runs, or a subcommand of `verl`, such as "verl train".
    """
    return text.format(program=program if program.startswith("verl ") else f"python -m {program}")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The `type` of an option of argparse: a whole number within the limits."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, found {text[:40]!r}")
        return value

    return read


def print_missing_package(error: ModuleNotFoundError) -> int:
    """Print which package to install. Returns the exit status. Any other error is raised again."""
    from verl.env_check.packages import CORE

    if (name := (error.name or "").partition(".")[0]) not in CORE:
        raise error
    print(
        f"error: the package {CORE[name][0]} is not installed: pip install '{CORE[name][0]}>={CORE[name][1]}' "
        "(`python -m verl.utils.env_check` lists all that is missing)",
        file=sys.stderr,
    )
    return 1


def print_error(error: Exception) -> int:
    """Print an error with its notes and without a traceback. Returns the exit status of a failed command."""
    if isinstance(error, ModuleNotFoundError):
        with contextlib.suppress(ModuleNotFoundError):  # of a package that is not one of ours
            return print_missing_package(error)
    notes = vars(error).get("__notes__", [])
    print(console_text("\n  ".join([f"error: {_message(error)}", *notes])), file=sys.stderr)
    return 1


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """End the command with one message, and status 1, for what a user can cause."""
    try:
        yield
    except USER_ERRORS as error:
        raise SystemExit(print_error(error)) from None


def _message(error: Exception) -> str:
    """The message of an error; of an error of the system, the file, the reason and the fix."""
    if not isinstance(error, OSError) or error.strerror is None or not isinstance(error.filename, str | bytes):
        return str(error)
    name, reason = os.fsdecode(error.filename), error.strerror
    return f"{name}: {reason}: expected a path that this user can read and write; check the path and its permissions"


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook` of the commands: without secrets and control characters."""
    print(console_text("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def shell_command() -> str:
    """The command of this process, without the paths of the interpreter and of the script `verl`."""
    script = [*sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
    return shlex.join([*(["verl"] if Path(sys.argv[0]).name == "verl" else ["python", *script]), *sys.argv[1:]])
