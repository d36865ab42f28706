"""`verl replay`: find the cause of a bad step."""

from pathlib import Path
from typing import Annotated

import typer

from verl.utils.redaction import console_text


def replay(
    dump: Annotated[Path, typer.Argument(metavar="DUMP", help="folder bad_steps/step_N of a run")],
) -> None:
    """Compute a bad step again on a CPU; print the samples and operators whose values are not finite.

    Exits with status 1 if no cause is found.
    """
    from verl.trainer.startup.command_line import user_errors
    from verl.trainer.state.replay import replay as run
    from verl.utils.log import setup_logging

    setup_logging("error")
    with user_errors():
        result = run(dump)
    typer.echo(console_text("\n".join(result.lines())))
    raise typer.Exit(0 if result.found else 1)
