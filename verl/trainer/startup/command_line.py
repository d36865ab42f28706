"""Common command line of all programs: `--config FILE.yaml key=value ...`, --dry-run, --print-config, --help."""

import argparse
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from verl.env_check.packages import CORE
from verl.processes.streams import command_output
from verl.trainer.guards.interruption import Stopped, sigterm_raises
from verl.trainer.startup.torchrun import run_under_launcher
from verl.utils.redaction import console_text, remember_arguments

if TYPE_CHECKING:
    from verl.config.fields import Schema

#: what a user can get wrong before a run starts: settings, files, packages, custom code
USER_ERRORS = (ValueError, ImportError, SyntaxError, OSError)

_FLAGS = ("--help", "-h", "--print-config", "--dry-run", "--verbose")

#: Hydra's options for a configuration file, and their short forms
_HYDRA = {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}
_HYDRA |= {name: name for name in _HYDRA.values()}

Program = Callable[[str | None, list[str]], int]
"""Config file and overrides -> exit status."""
DryRun = Callable[[str | None, list[str], bool], int]
"""The same, with --verbose."""


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
        elif name == "--chaos":
            overrides.append(f"trainer.chaos=[{value if equals else _next_of(name, rest)}]")
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
    found = find_config(options.get("--config-name"), directories)
    if found is not None:
        return str(found), []
    return None, [f"{CONFIGURATION}={name}"] if name in upstream_selections()[""] else []


def usage(text: str, program: str) -> str:
    """The --help of a program.

    Args:
        text: with `{program}` for the command.
        program: a module, which `python -m` runs, or a subcommand of `verl`, such as "verl train".
    """
    if not program.startswith("verl "):
        return text.format(program=f"python -m {program}")
    return text.format(program=program).replace("python -m verl.cli.config", "verl config explain")


@command_output()
def command_line(
    arguments: list[str] | None,
    help_text: str,
    settings: "Callable[[str | None, list[str]], Schema]",
    run: Program,
    dry_run: DryRun | None = None,
    check: Callable[[str | None, list[str]], object] | None = None,
) -> int:
    """Run a command line. Returns the exit status. Under torchrun, rank 0 runs it and the other ranks wait.

    Args:
        arguments: None for sys.argv.
        help_text: what --help prints.
        settings: the configuration that --print-config prints.
        run: the program; it reports its own errors.
        dry_run: what --dry-run runs instead; None if the program has none.
        check: raises ValueError for errors that are found without torch, whose import takes seconds. It runs first if
            torch is not loaded yet; the program runs these checks again, and all others.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    remember_arguments(arguments)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_traceback
    return run_under_launcher(lambda: _command(arguments, help_text, settings, run, dry_run, check))


def _command(
    arguments: list[str],
    help_text: str,
    settings: "Callable[[str | None, list[str]], Schema]",
    run: Program,
    dry_run: DryRun | None,
    check: Callable[[str | None, list[str]], object] | None,
) -> int:
    try:
        path, overrides, flags = split_arguments(arguments)
        if flags & {"--help", "-h"}:
            print(help_text)
            return 0
        if "--print-config" in flags:
            from verl.config.load import dump_config

            print(dump_config(settings(path, overrides), everything=True, redact=True))
            return 0
        if "--dry-run" in flags and dry_run is None:
            raise ValueError("--dry-run is not supported by this program")
        if "--verbose" in flags and "--dry-run" not in flags:
            raise ValueError("--verbose lists the checks of --dry-run: add --dry-run, or set trainer.log_level=debug")
        if check is not None and "torch" not in sys.modules:
            check(path, overrides)
    except USER_ERRORS as error:
        return print_error(error)
    from verl.utils.log import announce_loading  # not for --help

    announce_loading()
    try:
        with sigterm_raises():
            dry = dry_run if "--dry-run" in flags else None
            return run(path, overrides) if dry is None else dry(path, overrides, "--verbose" in flags)
    except ModuleNotFoundError as error:
        return print_missing_package(error)
    except KeyboardInterrupt as stop:  # once a run has started, `run` itself says more
        stop = stop if isinstance(stop, Stopped) else Stopped(signal.SIGINT)
        print(f"\nstopped by {stop.signal.name} before the run started", file=sys.stderr)
        return stop.exit_status


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
    if (name := _module_name(error)) not in CORE:
        raise error
    print(
        f"error: the package {CORE[name][0]} is not installed: pip install '{CORE[name][0]}>={CORE[name][1]}' "
        "(`python -m verl.utils.env_check` lists all that is missing)",
        file=sys.stderr,
    )
    return 1


def _module_name(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]


def print_error(error: Exception) -> int:
    """Print an error with its notes and without a traceback. Returns the exit status of a failed command."""
    if isinstance(error, ModuleNotFoundError) and _module_name(error) in CORE:
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
