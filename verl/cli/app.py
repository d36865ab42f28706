"""The command `verl`. A subcommand imports its modules at use, so that `verl --help` takes a fraction of a second."""

from pathlib import Path
from typing import Annotated, Any

import typer

from verl.cli.data import data, rewards
from verl.cli.programs import PROGRAMS, examples, recipes
from verl.cli.push import export, push
from verl.cli.runs import report, runs
from verl.cli.serve import serve
from verl.cli.sweep import sweep
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


@app.command("check")
def check(quiet: Annotated[bool, typer.Option("--quiet", help="Print only problems and remarks.")] = False) -> None:
    """Check packages and devices, and print the fixes. Exit status 1 if a component is missing or broken."""
    from verl.env_check.check import check_env

    check_env(verbose=not quiet)


config = typer.Typer(help="Explain, show, compare and convert configurations.", no_args_is_help=True)

_Program = Annotated[str, typer.Option("--of", help="program: ppo, sft, dpo, rm, generation or evaluation")]


@config.command("explain")
def explain(
    terms: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", help="only keys with all of them")] = None,
    program: _Program = "ppo",
) -> None:
    """Every key with type, default and meaning, or those whose line contains every WORD."""
    from verl.cli.config import explain as print_keys

    raise typer.Exit(print_keys(terms or [], program))


@config.command("show", context_settings=_PASS_ON)
def show(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    file: Annotated[str | None, typer.Option("--config", "-c", help="YAML file")] = None,
    changed: Annotated[bool, typer.Option(help="Only keys that differ from the defaults.")] = False,
    program: _Program = "ppo",
) -> None:
    """Print the configuration that a file and overrides give."""
    from verl.cli.config import show as print_config

    print_config(file, overrides or [], program, changed)


@config.command("diff")
def diff(
    a: Annotated[str, typer.Argument(help="YAML file, folder of a run or checkpoint, algorithm, or `defaults`")],
    b: Annotated[str, typer.Argument(help="the same")],
    program: _Program = "ppo",
) -> None:
    """Print the keys that differ between two configurations. Exit status 1 if there are any, as diff."""
    from verl.cli.config import diff as compared

    raise typer.Exit(compared(a, b, program))


@config.command("convert")
def convert(
    file: Annotated[Path, typer.Argument(help="YAML or JSON; a file or script with key=value words for public verl")],
    source: Annotated[
        str, typer.Option("--from", help="auto, verl, trl-grpo or trl-sft; auto decides by the keys")
    ] = "auto",
    program: Annotated[str, typer.Option("--of", help="program of a verl configuration: ppo or sft")] = "ppo",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the TRL run, whose batch sizes are per device")] = 1,
    overrides: Annotated[bool, typer.Option("--overrides", help="Print key=value lines instead of YAML.")] = False,
) -> None:
    """Convert a configuration of public verl or TRL."""
    from verl.cli.config import print_converted

    raise typer.Exit(print_converted(file, source, program, gpus, overrides))


app.add_typer(config, name="config")
app.add_typer(data, name="data")
app.add_typer(rewards, name="rewards")
app.add_typer(examples, name="examples")
app.add_typer(recipes, name="recipes")
app.command("serve")(serve)
app.command("push")(push)
app.add_typer(export, name="export")
app.command("sweep")(sweep)
app.add_typer(runs, name="runs")
app.command("report")(report)

if __name__ == "__main__":
    app()
