"""`verl report`: one HTML file about a run."""

from pathlib import Path
from typing import Annotated

import typer

from verl.utils.redaction import console_text


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of the run (trainer.default_local_dir)")],
    out: Annotated[Path | None, typer.Option(help="file to write; default: report.html in the folder")] = None,
) -> None:
    """Write one HTML file about a run: curves, settings, time, samples with their tokens, and warnings.

    The file needs no server and no network.
    """
    from verl.tracking.report import write_report
    from verl.trainer.startup.command_line import user_errors

    with user_errors():
        path = write_report(run, out)
    typer.echo(f"report: {console_text(str(path))} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")
