"""A command that reads settings, as one object: `python -m MODULE [--config FILE.yaml] key=value ...`."""

import pkgutil
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.processes.streams import command_output
from verl.trainer.guards.interruption import Stopped, sigterm_raises
from verl.trainer.startup.command_line import (
    USER_ERRORS,
    print_error,
    print_missing_package,
    print_traceback,
    split_arguments,
    usage,
)
from verl.trainer.startup.torchrun import run_under_launcher
from verl.utils.redaction import remember_arguments
from verl.utils.rendezvous import bypass_proxies

if TYPE_CHECKING:
    from verl.trainer.checks.preflight import Recipe, Run


def program_help(usage: str, start: str = "workers start", option: str = "") -> str:
    """What --help of a program prints, with `{program}` for the command.

    Args:
        usage: the arguments of an example, and further options.
        start: what a dry run does not do.
        option: of `verl config explain`, selects the keys of the program.
    """
    return f"""usage: {{program}} [--config FILE.yaml] key=value ...

  {{program}} {usage}
  --config FILE.yaml   settings from a file; keys on the command line override it
  --dry-run            run all checks, print the plan, and stop before {start}
  --verbose            with --dry-run: list the checks
  --print-config       print the resolved configuration, and stop
  --help               this text; all keys: verl config explain{option}
"""


@dataclass(frozen=True)
class Program:
    """A command that reads settings.

        PROGRAM = Program("verl.trainer.sft_trainer", HELP, "SFTConfig", "verl.trainer.sft:SFTTrainer")
        main = PROGRAM.main

    The settings are read and checked before torch is imported, which takes seconds, and are passed to the command.

    Attributes:
        module: what `python -m` runs.
        help: see `program_help`.
        schema: its configuration, a name of `verl.config.schema`.
        command: "module:Class" of what is built; its constructor runs the other checks.
        execute: "module:function" that runs what was built and returns the exit status.
        trainer: a subclass of PPOTrainer instead of `command`. It reads the settings itself, since its constructor may
            change them.
    """

    module: str
    help: str
    schema: str
    command: str
    execute: str = "verl.trainer.startup.launch:fit"
    trainer: type | None = None

    @command_output()
    def main(self, arguments: list[str] | None = None, program: str | None = None) -> int:
        """Run the command. Returns the exit status. Under torchrun, rank 0 runs it and the other ranks wait.

        Args:
            arguments: None for sys.argv.
            program: the name in --help: a module, or a subcommand of `verl`, such as "verl train".
        """
        arguments = sys.argv[1:] if arguments is None else arguments
        remember_arguments(arguments)
        bypass_proxies()
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = print_traceback
        return run_under_launcher(lambda: self._main(arguments, program or self.module))

    def _main(self, arguments: list[str], program: str) -> int:
        try:
            path, overrides, flags = split_arguments(arguments)
            if flags & {"--help", "-h"}:
                print(usage(self.help, program))
                return 0
            if "--print-config" in flags:
                self.print_config(path, overrides)
                return 0
            if "--verbose" in flags and "--dry-run" not in flags:
                raise ValueError(
                    "--verbose lists the checks of --dry-run: add --dry-run, or set trainer.log_level=debug"
                )
            run = self.read(path, overrides) if self.trainer is None else None
        except USER_ERRORS as error:
            return print_error(error)
        from verl.utils.log import announce_loading  # imports rich, which --help does not need

        announce_loading()
        try:
            with sigterm_raises():
                return self.start(path, overrides, run, flags)
        except ModuleNotFoundError as error:
            return print_missing_package(error)
        except KeyboardInterrupt as stop:  # once a run has started, `execute` itself says more
            stop = stop if isinstance(stop, Stopped) else Stopped(signal.SIGINT)
            print(f"\nstopped by {stop.signal.name} before the run started", file=sys.stderr)
            return stop.exit_status

    def recipe(self) -> "Recipe":
        from verl.config import schema
        from verl.trainer.checks.preflight import Recipe, recipe_of

        return Recipe(schema=getattr(schema, self.schema)) if self.trainer is None else recipe_of(self.trainer)

    def print_config(self, path: str | None, overrides: list[str]) -> None:
        from verl.config import dump_config, load_config
        from verl.trainer.checks.preflight import base_settings

        recipe = self.recipe()
        config = load_config(path, overrides, base=base_settings(recipe), schema=recipe.schema)
        print(dump_config(config, everything=True, redact=True))

    def read(self, path: str | None, overrides: list[str]) -> "Run":
        """Read the settings, and run the checks that need no torch. Raises ConfigError with all problems."""
        from verl.trainer.checks.preflight import SETTINGS, read_run

        return read_run(path, overrides, self.recipe(), SETTINGS)

    def start(self, path: str | None, overrides: list[str], run: "Run | None", flags: set[str]) -> int:
        """Build the command, and execute it or print its plan. Returns the exit status."""
        from verl.trainer.startup import launch

        def build() -> Any:
            if self.trainer is not None:
                return self.trainer(config_path=path, overrides=overrides)
            return pkgutil.resolve_name(self.command)(run)

        if "--dry-run" in flags:
            return launch.dry_run(build, "--verbose" in flags)
        return launch.run(build, pkgutil.resolve_name(self.execute))
