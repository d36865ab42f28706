"""The command `verl`. A subcommand imports its modules at use, so that `verl --help` takes a fraction of a second."""

from typing import Annotated, Any

import typer

from verl.cli.config.commands import config
from verl.cli.examples import examples
from verl.cli.programs import PROGRAMS
from verl.cli.runs import replay, report, runs
from verl.cli.serve import serve
from verl.processes.streams import command_output


def _print_version(asked: bool) -> None:
    if asked:
        from verl import __version__

        typer.echo(f"verl {__version__}")
        raise typer.Exit()


class _Command(typer.Typer):
    @command_output()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


app = _Command(
    name="verl",
    help="Reinforcement-learning post-training of large language models.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich takes longer to load than everything else of --help
    pretty_exceptions_enable=False,
)


@app.callback()
def _verl(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


#: the program reads its own options, --help included
_PASS_ON = {"ignore_unknown_options": True}
for _program in PROGRAMS:
    app.command(_program.name, help=_program.help, add_help_option=False, context_settings=_PASS_ON)(_program.command())

app.add_typer(config, name="config")
app.add_typer(examples, name="examples")
app.command("serve")(serve)
app.add_typer(runs, name="runs")
app.command("report")(report)
app.command("replay")(replay)

if __name__ == "__main__":
    app()
