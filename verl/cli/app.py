"""The command `verl`. A subcommand is a function with annotations of typer, which imports heavy modules at use."""

import typer

from verl.cli.report import report
from verl.cli.runs import runs
from verl.cli.serve import serve

app = typer.Typer(
    name="verl",
    help="Reinforcement-learning post-training of large language models.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _verl() -> None:
    """With a callback, typer treats a single command as a subcommand."""


app.command("serve")(serve)
app.add_typer(runs, name="runs")
app.command("report")(report)

if __name__ == "__main__":
    app()
