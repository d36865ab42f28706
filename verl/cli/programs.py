"""Subcommands of `verl` that run another program: `verl train ARGUMENTS` is `python -m verl.trainer.main_ppo`."""

import importlib
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
        module: has `main(arguments, program) -> exit status`.
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
            main = importlib.import_module(self.module).main
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


PROGRAMS = (
    Command("train", "verl.trainer.main_ppo", "Train with reinforcement learning: PPO, GRPO and others.", "ppo"),
    Command("plan", "verl.cli.plan", "Check a run; print its memory, time and best placement.", "ppo"),
    Command("sft", "verl.trainer.sft_trainer", "Supervised fine-tuning.", "sft"),
    Command("generate", "verl.trainer.main_generation", "Generate responses to the prompts of a file.", "generation"),
    Command("eval", "verl.trainer.main_eval", "Score responses; pass@k; compare two models.", "evaluation"),
    Command("merge", "verl.cli.merge", "Merge a checkpoint into a Hugging Face model."),
    Command("verify-resume", "verl.cli.verify_resume", "Check that a resumed run equals an uninterrupted one.", "ppo"),
    Command("check", "verl.cli.check", "Check packages and devices, and print the fixes."),
    Command("quickstart", "verl.cli.quickstart", "Train a tiny model with GRPO and watch its reward rise."),
)
