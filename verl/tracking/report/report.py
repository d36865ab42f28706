"""Reads the folder of a run, and writes the page: data as JSON in a template, drawn by page.js.

Texts of the run reach the page as JSON only, and page.js inserts them as text nodes, so no response can become markup.
"""

import itertools
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl.tracking.curves import PANELS, centred_mean, robust_limits
from verl.tracking.formatting import best_point, counted, ends, format_duration
from verl.tracking.runs import RecordedRun, Series, open_run, read_lines
from verl.utils.paths import write_text
from verl.utils.redaction import printable

#: points of a curve, and columns of a heat map, that are shown; more are thinned evenly
MAX_POINTS = 1000
MAX_COLUMNS = 120
#: best and worst samples that are listed
_EXTREMES = 5
#: validation samples that are shown
_VALIDATION_SAMPLES = 20

#: panels after those of curves.PANELS: title -> metrics that are drawn together
_MORE_PANELS: dict[str, tuple[str, ...]] = {
    "zero-variance groups": ("reward/tied_groups",),
    "gradient norm": ("actor/grad_norm", "critic/grad_norm", "train/grad_norm"),
    "training-inference mismatch": ("rollout/logprob_gap_mean", "rollout/logprob_gap_max"),
    "clipped tokens": ("actor/pg_clipfrac", "critic/vf_clipfrac"),
    "responses cut at the limit": ("response_length/clip_ratio",),
    "critic": ("critic/vf_loss", "critic/vf_explained_var"),
    "staleness": ("async/staleness_mean", "async/staleness_max"),
    "memory (GiB)": ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb"),
    "tokens per second": ("perf/throughput", "rollout/tokens_per_second"),
}


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run and return its path.

    Args:
        out: file to write; None: report.html in the folder.

    Raises:
        ValueError: if the folder has no run, or the run has no metrics.jsonl.
    """
    run = open_run(folder)
    if not run.metrics:
        raise ValueError(
            f"{run.folder} has no metrics: expected lines in metrics.jsonl, which the tracker jsonl of trainer.logger "
            "writes after each step"
        )
    assets = Path(__file__).parent
    content = _escaped(report_data(run))
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    page = (assets / "page.html").read_text(encoding="utf-8")
    for name, text in (
        ("/*page.css*/", (assets / "page.css").read_text(encoding="utf-8")),
        ("/*page.js*/", (assets / "page.js").read_text(encoding="utf-8")),
        # "<" would end the script element in which the data is; lone surrogates are not UTF-8
        ("/*data*/", data.replace("<", "\\u003c").encode("utf-8", "backslashreplace").decode()),
    ):
        page = page.replace(name, text, 1)
    out = run.folder / "report.html" if out is None else Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)
    return out


def _escaped(value: Any) -> Any:
    """A value whose texts show control characters, and those that change the direction of writing, as escapes."""
    if isinstance(value, Mapping):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return printable(value) if isinstance(value, str) and not value.isprintable() else value


def report_data(run: RecordedRun) -> dict[str, Any]:
    """The contents of the page, as JSON."""
    steps = _unique_steps(read_lines(run.folder / "steps.jsonl"))
    names = [name for name in run.metrics if not name.startswith(("timing_s/", "training/"))]
    return {
        "title": run.title,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "about": _about(run),
        "tiles": _tiles(run),
        "warnings": list(read_lines(run.folder / "warnings.jsonl")),
        "panels": list(_panels(run)),
        "metrics": [_panel(run, name, [name]) for name in sorted(names)],
        "timing": _timing(run),
        "steps": steps,
        "extremes": _extremes(steps),
        "validation": _validation_samples(run),
        "changed": dict(run.about.get("changed", {})),
        "command": run.about.get("command"),
        "packages": run.about.get("packages", {}),
        "config": dict(run.config),
    }


def _about(run: RecordedRun) -> dict[str, Any]:
    values = {name: run.about.get(name) for name in ("project", "experiment", "error")}
    values = {"state": run.state, "algorithm": run.algorithm, "model": run.model} | values
    return {name: value for name, value in values.items() if value}


def _tiles(run: RecordedRun) -> list[tuple[str, str, str]]:
    """(label, value, note) of the main figures."""
    total = run.about.get("total_steps")
    tiles = [("steps", f"{run.steps} of {total}" if total else str(run.steps), "")]
    if run.reward_name:
        label = "score" if run.reward_name.startswith("critic/") else "loss"
        values = [value for _, value in run.metrics[run.reward_name]]
        first, last, window = ends(values)
        tiles.append(
            (f"training {label}", f"{first:.3g} → {last:.3g}", f"mean of the first and last {counted(window, 'step')}")
        )
    for name in run.validation_names[:2]:
        series = run.metrics[name]
        step, best = best_point(name, series)
        value = f"{series[0][1]:.3g} → {series[-1][1]:.3g}"
        tiles.append((run.validation_label(name), value, f"best {best:.3g} at step {step}"))
    trainer, note = run.config, "steps and validations"
    if "perf/max_memory_allocated_gb" in run.metrics:  # on GPUs
        gpus = trainer.get("trainer.nnodes", 1) * trainer.get("trainer.n_gpus_per_node", 1)
        note += f"; {run.seconds * gpus / 3600:.2g} GPU hours"
    return [*tiles, ("time", format_duration(run.seconds), note)]


def _panels(run: RecordedRun) -> Iterator[dict[str, Any]]:
    for index, (title, names) in enumerate(PANELS.items()):
        if present := [name for name in names if name in run.metrics][:1]:
            validation = run.validation_names if title == "score" or (title == "loss" and index == 1) else []
            yield _panel(run, title, present, validation if run.reward_name == present[0] else [])
    for title, names in _MORE_PANELS.items():
        if present := [name for name in names if name in run.metrics]:
            yield _panel(run, title, present)


def _panel(run: RecordedRun, title: str, names: Sequence[str], validation: Sequence[str] = ()) -> dict[str, Any]:
    """Curves that share the axes. `limits`: of the y-axis, if outliers would stretch it."""
    curves = []
    for name in (*names, *validation):
        series, kind = run.metrics[name], "line" if name in names else "dots"
        points = _thinned(series, MAX_POINTS)
        low, high = robust_limits([value for _, value in series]) or (-math.inf, math.inf)
        kept = [min(max(value, low), high) for _, value in series]  # an outlier lifts its neighbors otherwise
        mean = dict(zip((step for step, _ in series), centred_mean(kept)))
        smooth = [mean[step] for step, _ in points] if len(points) > 10 and kind == "line" else []
        label = name if kind == "line" else run.validation_label(name)
        curves.append({"label": label, "kind": kind, "points": points, "smooth": smooth})
    values = [value for curve in curves for _, value in curve["points"]]
    return {
        "title": title,
        "curves": curves,
        "limits": robust_limits(values),
        "help": " ".join(dict.fromkeys(text for name in names if (text := describe(name)))),
    }


def _timing(run: RecordedRun) -> dict[str, Any]:
    operators = {
        name.removeprefix("timing_s/"): dict(series)
        for name, series in run.metrics.items()
        if name.startswith("timing_s/") and name not in ("timing_s/step", "timing_s/testing")
    }
    total = dict(run.metrics.get("timing_s/step", ()))
    steps = [step for step, _ in _thinned([(step, 0.0) for step in total], MAX_COLUMNS)]
    totals = {name: sum(seconds.values()) for name, seconds in operators.items()}
    return {
        "steps": steps,
        "step_seconds": [total[step] for step in steps],
        "operators": [
            {"name": name, "seconds": [operators[name].get(step, 0.0) for step in steps], "total": totals[name]}
            for name in sorted(totals, key=lambda name: -totals[name])
        ],
        "total": sum(total.values()),
        "testing": sum(value for _, value in run.metrics.get("timing_s/testing", ())),
    }


def _unique_steps(records: Iterator[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last record of each step, in order. Records without a step or its samples are skipped."""
    complete = (r for r in records if isinstance(r.get("step"), int) and isinstance(r.get("samples"), list))
    return [dict(record) for _, record in sorted({record["step"]: record for record in complete}.items())]


def _extremes(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The samples with the highest and lowest scores of the last quarter of the recorded steps, as (step, index)."""
    recent = steps[-max(1, len(steps) // 4) :]
    samples = [(record["step"], i, sample) for record in recent for i, sample in enumerate(record["samples"])]
    # None: the score was NaN or infinite
    scored = [(sample["score"], step, i) for step, i, sample in samples if sample.get("score") is not None]
    worst = sorted(scored, key=lambda item: (item[0], -item[1]))
    best = sorted(scored, key=lambda item: (-item[0], -item[1]))
    return {"best": [item[1:] for item in best[:_EXTREMES]], "worst": [item[1:] for item in worst[:_EXTREMES]]}


def _validation_samples(run: RecordedRun) -> list[dict[str, Any]]:
    """Samples of the last validation, if trainer.log_val_generations recorded some."""
    tables = [table for table in read_lines(run.folder / "samples.jsonl") if table.get("name") == "val/generations"]
    tables = [table for table in tables if "step" in table and isinstance(table.get("rows"), list)]
    return [{**row, "step": tables[-1]["step"]} for row in tables[-1]["rows"][:_VALIDATION_SAMPLES]] if tables else []


def _thinned(series: Series, limit: int) -> Series:
    """At most about `most` points, evenly spaced, with the last one."""
    stride = -(-len(series) // limit)
    kept = list(series[::stride]) if stride > 1 else list(series)
    return kept if not series or kept[-1] == series[-1] else [*kept, series[-1]]


# ---- the meaning of metrics: `metric_names.yaml`, the one list of their names ----------------------------------------


@dataclass(frozen=True)
class Metric:
    """An entry of the list.

    Attributes:
        section: heading on the page.
        names: pattern of names; `*` is any text, `{a,b}` are alternatives.
        watch: healthy values, and what to do about others; empty if there is nothing to watch.
    """

    section: str
    names: str
    unit: str
    meaning: str
    watch: str = ""

    @property
    def patterns(self) -> list[str]:
        """The names without alternatives."""
        parts = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.split(r"({[^}]*})", self.names)]
        return ["".join(choice) for choice in itertools.product(*parts)]

    def matches(self, name: str) -> bool:
        """Whether a metric is described by this entry."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


@cache
def metrics() -> tuple[Metric, ...]:
    """Every entry of the list, in order. A name is described by the first entry that matches."""
    text = (Path(__file__).parents[1] / "metric_names.yaml").read_text(encoding="utf-8")
    sections = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return tuple(
        Metric(section, **{key: str(value) for key, value in entry.items()})
        for section, entries in sections.items()
        for entry in entries
    )


def find(name: str) -> Metric | None:
    """The entry of a metric; None if it is not in the list."""
    return next((metric for metric in metrics() if metric.matches(name)), None)


def describe(name: str) -> str:
    """Meaning of a metric, and what to watch, without references to pages; empty if it is not in the list."""
    metric = find(name)
    text = f"{metric.meaning} {metric.watch}".strip() if metric else ""
    text = re.sub(r" ?See \[[^\]]*\]\([^)]*\)\.", "", text)
    return re.sub(r"`|\[([^]]*)\]\([^)]*\)", lambda match: match[1] or "", text)
