"""Subcommands of `verl` that run another program: `verl train ARGUMENTS` is `python -m verl.trainer.main_ppo`."""

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

_FLAGS = ("--config", "--calibrate", "--gpus", "--dry-run", "--verbose", "--print-config", "--help")


@dataclass(frozen=True)
class Command:
    """A subcommand that passes its arguments on.

    Attributes:
        name: the subcommand.
        module: has `main(arguments, program) -> exit status`, or a function that is named after a colon.
        help: one line for `verl --help`.
        schema: name in `verl.cli.config.SCHEMAS` of the schema whose keys the shell completes; "": none.
    """

    name: str
    module: str
    help: str
    schema: str = ""

    def command(self) -> Callable[..., None]:
        """The function that typer registers: it runs the program and exits with its status."""

        def run(
            arguments: Annotated[list[str] | None, typer.Argument(autocompletion=self.completions)] = None,
        ) -> None:
            module, _, function = self.module.partition(":")
            main = getattr(importlib.import_module(module), function or "main")
            raise typer.Exit(main(arguments or [], program=f"verl {self.name}"))

        return run

    def completions(self, incomplete: str) -> list[str]:
        """Keys of the configuration, and flags, that start with `incomplete`."""
        if not self.schema:
            return []
        from verl.cli.config import SCHEMAS
        from verl.config.fields import fields_of

        candidates = [*_FLAGS, *(f"{key}=" for key in fields_of(SCHEMAS[self.schema]))]
        return [word for word in candidates if word.startswith(incomplete)]


def check(arguments: list[str], program: str) -> int:
    """The environment check, as `python -m verl.utils.env_check`. Exits with 1 if a component is missing or broken."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Check the packages and devices of this machine, and print the fix for every problem. "
        "`verl train --dry-run` checks a configuration and its data.",
    )
    parser.add_argument("--quiet", action="store_true", help="print only problems and remarks")
    options = parser.parse_args(arguments)
    from verl.env_check.check import check_env

    check_env(verbose=not options.quiet)
    return 0


def merge(arguments: list[str], program: str) -> int:
    """verl.model_merger, whose command `merge` is the default."""
    from verl.model_merger.__main__ import main as merger

    asks_for_help = arguments[:1] in ([], ["-h"], ["--help"])
    command = [] if asks_for_help or arguments[0] in ("merge", "test") else ["merge"]
    return merger([*command, *(arguments or ["--help"])], program)


def quickstart(arguments: list[str], program: str) -> int:
    """examples/quickstart/run.py, also from an installed package."""
    from verl.cli.examples import FOLDER
    from verl.registry import import_module

    before = sys.argv
    sys.argv = [program, *arguments]
    try:
        return import_module(str(FOLDER / "quickstart" / "run.py")).main(arguments)
    finally:
        sys.argv = before


PROGRAMS = (
    Command("train", "verl.trainer.main_ppo", "Train with reinforcement learning: PPO, GRPO and others.", "ppo"),
    Command("plan", "verl.cli.plan", "Check a run; print its memory, time and best placement.", "ppo"),
    Command("sft", "verl.trainer.sft_trainer", "Supervised fine-tuning.", "sft"),
    Command("generate", "verl.trainer.main_generation", "Generate responses to the prompts of a file.", "generation"),
    Command("eval", "verl.trainer.main_eval", "Score responses; pass@k; compare two models.", "evaluation"),
    Command("merge", "verl.cli.programs:merge", "Merge a checkpoint into a Hugging Face model."),
    Command("verify-resume", "verl.cli.verify_resume", "Check that a resumed run equals an uninterrupted one.", "ppo"),
    Command("check", "verl.cli.programs:check", "Check packages and devices, and print the fixes."),
    Command("quickstart", "verl.cli.programs:quickstart", "Train a tiny model with GRPO and watch its reward rise."),
)
