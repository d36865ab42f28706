"""`verl verify-resume`: check that a resumed run of a configuration equals an uninterrupted one."""

import sys
from typing import Any

from verl.processes.streams import command_output
from verl.utils.redaction import console_text

HELP = """usage: verl verify-resume [--steps N] [--config FILE.yaml] key=value ...

Trains N steps (default 4) without an interruption, and N/2 steps, a resume and the rest, in a temporary folder.
Compares every tensor, file and metric. Exits with status 1 if they differ.
"""


@command_output()
def main(arguments: list[str] | None = None, program: str = "verl verify-resume") -> int:
    """Run the command. Returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or {"--help", "-h"} & set(arguments):
        print(HELP)
        return 0
    from verl.trainer.startup.command_line import USER_ERRORS, print_error, split_arguments
    from verl.trainer.state.verify_resume import verify

    try:
        steps, rest = _steps(arguments)
        path, overrides, _ = split_arguments(rest)

        def train(fixed: list[str], count: int | None) -> Any:
            from verl.trainer.ppo_trainer import PPOTrainer

            return PPOTrainer(config_path=path, overrides=[*overrides, *fixed]).fit(count)

        comparison = verify(train, steps)
    except USER_ERRORS as error:
        return print_error(error)
    print(console_text("\n".join(comparison.lines())))
    return 1 if comparison.differences else 0


def _steps(arguments: list[str]) -> tuple[int, list[str]]:
    """(--steps, the other arguments). Raises ValueError unless it is at least 2."""
    rest, text = [], "4"
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name == "--steps":
            text = value if equals else next(remaining, "")
        else:
            rest.append(argument)
    if not text.isdecimal() or int(text) < 2:
        raise ValueError(f"--steps: expected int >= 2, found {text!r}")
    return int(text), rest
