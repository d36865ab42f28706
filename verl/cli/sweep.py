"""`verl sweep`: one run per point of a grid or random sample of settings, with a table and curves of the results."""

import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any
from urllib.parse import quote

import typer

from verl.cli.runs import new_table, print_table
from verl.utils.redaction import console_text

#: name -> a random value, of the numbers or values in the file
DISTRIBUTIONS: dict[str, Callable[..., Any]] = {
    "uniform": lambda random, low, high: random.uniform(low, high),
    "log_uniform": lambda random, low, high: math.exp(random.uniform(math.log(low), math.log(high))),
    "integer": lambda random, low, high: random.randint(low, high),
    "choice": lambda random, *values: random.choice(values),
}
_COMMANDS = ("train", "sft", "dpo", "rm")
_DEFAULTS = {"command": "train", "config": None, "folder": None, "metric": None, "trials": 1, "seed": 0}
_PLOTTED = 10  # the best trials
_POLL_SECONDS = 0.2
_SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --gpus-per-node=1
# Afterwards, the command `verl sweep` that wrote this file prints the results.
case $SLURM_ARRAY_TASK_ID in
{cases}
esac
"""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its trainer.default_local_dir, key -> value of the keys that vary, and its command."""

    folder: Path
    settings: Mapping[str, Any]
    command: tuple[str, ...]

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def run(self) -> Any:
        """Its `RecordedRun`, which is empty before its workers have started."""
        from verl.tracking.runs import RecordedRun, read_about

        return RecordedRun(self.folder, read_about(self.folder))

    def state(self) -> str:
        """That of the run; of one that has failed, with the last error of its log."""
        state = self.run.state
        if state not in ("failed", "unknown") or not self.log.is_file():
            return "not started" if state == "unknown" else state
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
        return f"failed: {next((line for line in reversed(lines) if line.startswith('error:')), lines[-1])}"


def read_sweep(file: Path, overrides: Sequence[str]) -> tuple[list[Trial], str | None]:
    """The trials of a sweep, whose settings are checked, and its metric. Raises ValueError if something is wrong with
    these, or the folder has trials with other common settings."""
    from verl.cli.config import SCHEMAS
    from verl.cli.programs import PROGRAMS
    from verl.config import load_config
    from verl.config.sources import read_yaml

    options = _DEFAULTS | {key: setting.value for key, setting in read_yaml(file).items()}
    command, folder = options["command"], Path(options["folder"] or f"sweeps/{file.stem}")
    schemas = {program.name: SCHEMAS[program.schema] for program in PROGRAMS if program.name in _COMMANDS}
    wrong = [key for key in options if key not in _DEFAULTS and not key.startswith(("grid.", "random."))]
    wrong += [] if command in schemas else [f"command: {command}"]
    wrong += [f"{key}: {options[key]}" for key in ("trials", "seed") if not isinstance(options[key], int)]
    if wrong or len(options) == len(_DEFAULTS):
        keys = f"grid or random, {', '.join(_DEFAULTS)}, and a command of {', '.join(_COMMANDS)}"
        raise ValueError(f"{file}: expected the keys {keys}; found {wrong[0] if wrong else 'nothing to vary'}")
    config = None if options["config"] is None else file.parent / options["config"]
    flags, trials = [] if config is None else ["--config", str(config)], {}
    for point in _points(file, options):
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in point.items()}
        name = quote("_".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items()), safe="=+[],")
        settings = [*overrides, *(f"{key}={value}" for key, value in values.items())]
        settings.append(f"trainer.default_local_dir={folder / name}")
        load_config(config, settings, schema=schemas[command])
        trials[name] = Trial(folder / name, point, (sys.executable, "-m", "verl", command, *flags, *settings))
    shared = json.dumps([command, "" if config is None else config.read_text(encoding="utf-8"), *overrides])
    record = folder / "sweep.json"
    if record.is_file() and record.read_text(encoding="utf-8") != shared:
        raise ValueError(f"{folder} has trials of another command, config or overrides: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(shared, encoding="utf-8")
    return list(trials.values()), options["metric"]


def _points(file: Path, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings of the trials: every point of the grid, for each random sample."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
    grid = {key.removeprefix("grid."): values for key, values in lists.items() if key.startswith("grid.")}
    drawn = {key: key.removeprefix("random.").rpartition(".") for key in options if key.startswith("random.")}
    for index in range(options["trials"] if drawn else 1):
        sample = {}
        for origin, (key, _, name) in drawn.items():
            try:
                value = DISTRIBUTIONS[name](Random(f"{options['seed']} {index} {key}"), *options[origin])
            except (KeyError, TypeError, ValueError, IndexError):
                names = ", ".join(DISTRIBUTIONS)
                raise ValueError(f"{file}: {origin}: {options[origin]}: expected values for one of {names}") from None
            sample[key] = float(f"{value:.4g}") if isinstance(value, float) else value
        yield from (sample | dict(zip(grid, values)) for values in itertools.product(*grid.values()))


def sweep(
    file: Annotated[Path, typer.Argument(help="YAML with grid or random, and config, command, metric, folder")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="of every trial")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="trials at a time")] = 1,
    gpus: Annotated[list[str] | None, typer.Option(help="of one trial at a time: --gpus 0,1 --gpus 2,3")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write the script of a Slurm job array; run nothing.")] = False,
) -> None:
    """Run a grid or random samples of settings, and compare the results.

    The same command continues a sweep: trials that have finished are not repeated.
    """
    from verl.trainer.guards.interruption import Stopped, sigterm_raises
    from verl.trainer.startup.command_line import user_errors

    with user_errors(), sigterm_raises():
        trials, metric = read_sweep(file, overrides or [])
        pending = [trial for trial in trials if trial.state() not in ("finished", "running")]
        typer.echo(f"{len(trials)} trials, {len(pending)} to run")
        if slurm and pending:
            cases = [f"{i}) {shlex.join(t.command)} > {shlex.quote(str(t.log))} 2>&1 ;;" for i, t in enumerate(pending)]
            script = trials[0].folder.with_name("sweep.slurm")
            text = _SLURM.format(name=file.stem, last=len(pending) - 1, cases="\n".join(cases))
            script.write_text(text, encoding="utf-8")
            return typer.echo(console_text(f"sbatch {script}"))
        try:
            run_trials(pending, gpus or [None] * jobs)
        except KeyboardInterrupt as stop:
            stop = stop if isinstance(stop, Stopped) else Stopped(signal.SIGINT)
            typer.echo(f"stopped by {stop.signal.name}: the same command continues the sweep", err=True)
            raise typer.Exit(stop.exit_status) from None
        print_results(trials, metric)
    raise typer.Exit(any(trial.state() != "finished" for trial in trials))


def run_trials(pending: Sequence[Trial], lanes: Sequence[str | None]) -> None:
    """Run trials, one at a time in each lane: a CUDA_VISIBLE_DEVICES; None: that of this process."""
    waiting, running = list(pending), dict[int, tuple[Trial, subprocess.Popen]]()
    try:
        while waiting or running:
            for lane, devices in enumerate(lanes):
                if lane in running and running[lane][1].poll() is not None:
                    trial, _ = running.pop(lane)
                    typer.echo(console_text(f"{trial.folder.name}: {trial.state()}"))
                if lane not in running and waiting:
                    trial = waiting.pop(0)
                    typer.echo(console_text(f"{trial.folder.name}: running; log: {trial.log}"))
                    env = os.environ | ({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})
                    with trial.log.open("wb") as log:
                        process = subprocess.Popen(trial.command, stdout=log, stderr=subprocess.STDOUT, env=env)
                    running[lane] = trial, process
            time.sleep(_POLL_SECONDS)
    finally:  # after an interruption: they finish and save their step
        for _, process in running.values():
            process.send_signal(signal.SIGINT)
        for _, process in running.values():
            process.wait()


def print_results(trials: Sequence[Trial], metric: str | None) -> None:
    """Print a table, the best trial first, and plot the curves of the best trials into sweep.png."""
    from verl.tracking.curves import save_comparison
    from verl.tracking.formatting import best_point, format_duration

    runs = [trial.run for trial in trials]
    names = [name for run in runs for name in (*run.validation_names, run.reward_name) if name is not None]
    name = metric or (names[0] if names else "score")
    series = [run.metrics.get(name, ()) for run in runs]
    best = {i: best_point(name, points)[1] for i, points in enumerate(series) if points}
    rises = best_point(name, [(0, 0.0), (1, 1.0)])[0] == 1
    ranked = sorted(best, key=best.get, reverse=rises)
    keys = [key.rpartition(".")[2] for key in trials[0].settings]
    table = new_table(*keys, f"best {name}", "last", "steps", "time", "state")
    for i in [*ranked, *(i for i in range(len(trials)) if i not in best)]:
        scores = [f"{best[i]:.4g}", f"{series[i][-1][1]:.4g}"] if i in best else ["-", "-"]
        progress = [runs[i].steps, format_duration(runs[i].seconds), trials[i].state()]
        table.add_row(*(console_text(str(cell)) for cell in (*trials[i].settings.values(), *scores, *progress)))
    print_table(table)
    groups: dict[str, list[float]] = {}
    for i in ranked:
        others = [f"{key}={value}" for key, value in zip(keys, trials[i].settings.values()) if not key.endswith("seed")]
        groups.setdefault(" ".join(others), []).append(best[i])
    for others, scores in groups.items():
        if others and len(scores) > 1:
            typer.echo(console_text(f"{others}: mean {fmean(scores):.4g} of {len(scores)} seeds"))
    if not best:
        typer.echo(console_text(f"no trial has the metric {name}"))
    else:
        path, plotted = trials[0].folder.with_name("sweep.png"), [runs[i] for i in ranked[:_PLOTTED]]
        save_comparison(plotted, path, None if metric is None else [metric], [run.name for run in plotted])
        typer.echo(console_text(f"picture: {path}"))
