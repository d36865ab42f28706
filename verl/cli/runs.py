"""Commands on finished runs: `verl runs` lists and compares them, `verl report` explains one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from verl.utils.redaction import console_text

runs = typer.Typer(help="List and compare runs.", no_args_is_help=False)

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="searched with its subfolders")]

_Limit = Annotated[int, typer.Option(min=0, help="number of runs; 0: all")]


@runs.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    """List the runs in `checkpoints`, and compare runs."""
    if context.invoked_subcommand is None:
        list_runs()


@runs.command("list")
def list_runs(folder: _Folder = Path("checkpoints"), limit: _Limit = 50) -> None:
    """List the runs of a folder, the newest first."""
    from verl.tracking.formatting import counted, format_duration
    from verl.tracking.runs import LOSSES, open_run, run_folders
    from verl.trainer.startup.command_line import user_errors

    with user_errors():
        folders = run_folders(folder)
        records = [open_run(path) for path in (folders[:limit] if limit else folders)]
    if not records:
        typer.echo(
            f"no runs in {console_text(str(folder))}: expected folders with run.json or metrics.jsonl. For "
            "another folder: verl runs list FOLDER",
            err=True,
        )
        raise typer.Exit(1)
    losses = ["loss"] if any(run.reward_name in LOSSES for run in records) else []
    figured = ["reward", "best", *losses, "validation", "best"]
    table = new_table("run", "algorithm", "model", "steps", *figured, "state", "age")
    for column in table.columns:
        column.no_wrap, column.justify = column.header != "run", "right" if column.header in _NUMBERS else "left"
    for run in records:
        total = run.about.get("total_steps")
        name = str(run.folder.relative_to(folder)) if run.folder != folder else run.name
        steps = f"{run.steps}/{total}" if total else str(run.steps)
        rewards, validation = ("-", "-"), next(iter(run.validation_names), None)
        trained = _figures(run.reward_name, run.metrics.get(run.reward_name or "", ()))[1:]
        rewards, loss = (rewards, trained) if run.reward_name in LOSSES else (trained, rewards)
        figures = [*rewards, *loss[: len(losses)], *_figures(validation, run.metrics.get(validation or "", ()))[1:]]
        cells = (name, run.algorithm, run.model, steps, *figures, run.state, format_duration(run.age))
        table.add_row(*map(console_text, cells))
    print_table(table)
    if len(records) < len(folders):
        typer.echo(
            f"{counted(len(folders) - len(records), 'older run')} in {console_text(str(folder))}: --limit 0 lists all"
        )


@runs.command("compare")
def compare_runs(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of two or more runs")],
    out: Annotated[Path, typer.Option(help="plot to write")] = Path("compare.png"),
    metric: Annotated[list[str] | None, typer.Option(help="metric to plot; several: --metric A --metric B")] = None,
) -> None:
    """Plot the curves of runs together, and print what differs.

    The tables list the settings that differ, and the first, last and best value of each metric in the plot.
    """
    from verl.tracking.curves import save_comparison
    from verl.tracking.formatting import format_duration
    from verl.tracking.runs import differing_settings, labels, open_run, short_names
    from verl.trainer.startup.command_line import user_errors

    with user_errors():
        records = [open_run(folder) for folder in folders]
        if len(records) < 2:
            raise ValueError("expected the folders of two or more runs, found one: verl runs compare A B")
        plot = save_comparison(records, out, metric)
    names = [console_text(name) for name in short_names(records)]
    table = new_table("setting", *names)
    for key, values in differing_settings(records).items():
        table.add_row(console_text(key), *("-" if value is None else console_text(str(value)) for value in values))
    if table.row_count:
        print_table(table, _WIDEST)
    else:
        typer.echo(
            "no setting differs" if all(run.config for run in records) else "no configuration: a run has no run.json"
        )
    table = new_table("first -> last (best)", *names)
    for name in metric or _shown_metrics(records):
        table.add_row(console_text(name), *(_range(name, run.metrics.get(name)) for run in records))
    table.add_row("steps", *(str(run.steps) for run in records))
    table.add_row("time", *(format_duration(run.seconds) for run in records))
    print_table(table, _WIDEST)
    typer.echo(console_text(f"legend: {'; '.join(labels(records))}\nplot: {plot}"))


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


_NUMBERS = ("steps", "reward", "best", "loss", "validation")


#: characters of a table whose cells may be folded, where there is no terminal
_WIDEST = 120


def new_table(*columns: str) -> Any:
    from rich.table import Column, Table

    headings = [Column(column, overflow="fold") for column in columns]
    return Table(*headings, box=None, header_style="bold", pad_edge=False)


def print_table(table: Any, widest: int = 10_000) -> None:
    """Print a table: as wide as the terminal, otherwise as wide as its content, or `widest`."""
    from rich.console import Console

    plain = {"highlight": False, "markup": False, "emoji": False}  # names of runs may look like markup
    console = Console(**plain)
    if not console.is_terminal:
        wide = Console(**plain, width=10_000)
        console = Console(**plain, width=min(max(console.width, wide.measure(table).maximum), widest))
    console.print(table)


def _shown_metrics(records: list[Any]) -> list[str]:
    """The metrics of the panels, and of the validations, that any run has."""
    from verl.tracking.curves import PANELS

    present = {name for run in records for name in run.metrics}
    plotted = [name for names in PANELS.values() for name in names if name in present]
    validation = dict.fromkeys(name for run in records for name in run.validation_names)
    return [*plotted, *validation, *(name for name in ("perf/throughput", "actor/grad_norm") if name in present)]


def _figures(name: str | None, series: Any) -> tuple[str, str, str]:
    """First, last and best value as text. "-": no value, or no best one, such as of a length."""
    from verl.tracking.formatting import best_point, format_number

    if not series:
        return "-", "-", "-"
    has_best = name.startswith(("critic/score", "critic/rewards", "val", "train/"))
    best = format_number(best_point(name, series)[1]) if has_best else "-"
    return format_number(series[0][1]), format_number(series[-1][1]), best


def _range(name: str, series: Any) -> str:
    first, last, best = _figures(name, series)
    return f"{first} -> {last}" + ("" if best == "-" else f" ({best})") if series else "-"
