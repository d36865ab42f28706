"""Plots of learning curves, of one run or several, from the metrics.jsonl in their folders."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.tracking.formatting import HEADLINES
from verl.tracking.runs import RecordedRun, labels, read_about, read_metrics
from verl.utils.redaction import printable

__all__ = ["centred_mean", "moving_mean", "read_metrics", "robust_limits", "save_comparison", "save_curves"]

#: title of a panel -> metrics, of which the first one present is plotted
PANELS: dict[str, tuple[str, ...]] = {
    "score": HEADLINES["reward"],
    "loss": ("train/nll", "train/loss"),
    "response length (tokens)": HEADLINES["length"],
    "KL to the reference": HEADLINES["kl"],
    "entropy": HEADLINES["entropy"],
}

#: default window of the trailing mean, in steps
WINDOW = 10
#: default window of the centred mean, in steps; odd
CENTRED = 11


def moving_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Trailing mean over at most `window` values."""
    return _means(values, window - 1, 0)


def centred_mean(values: Sequence[float], window: int = CENTRED) -> list[float]:
    """Centred mean over at most `window` values: `window // 2` on each side, fewer at both ends."""
    return _means(values, window // 2, window // 2)


def _means(values: Sequence[float], before: int, after: int) -> list[float]:
    """The mean of each value with those before and after it."""
    chunks = (values[max(i - before, 0) : i + after + 1] for i in range(len(values)))
    return [sum(chunk) / len(chunk) for chunk in chunks]  # no cumulative sum, which a NaN would spoil from there on


def robust_limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Limits of an axis that a few outliers do not stretch; None if there are none. An outlier is further from the
    middle half of the values than four times its width, and there may be at most 5 %."""
    ordered = sorted(values)
    if len(ordered) < 8:
        return None
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.25, 0.75))
    width = high - low
    kept = [value for value in ordered if low - 4 * width <= value <= high + 4 * width]
    if width == 0 or len(kept) == len(ordered) or len(kept) < 0.95 * len(ordered):
        return None
    margin = 0.05 * (kept[-1] - kept[0])
    return kept[0] - margin, kept[-1] + margin


def save_curves(metrics_jsonl: str | Path, out_png: str | Path, keys: Sequence[str] | None = None) -> Path:
    """Plot the metrics of a run over steps into a PNG and return its path.

    Each panel shows the values and their centred mean over 11 steps; the first one also shows validation results.
    The run.json in the same folder, if there is one, gives the title.

    Args:
        metrics_jsonl: file written by the jsonl tracker.
        keys: one panel per metric, instead of score or loss, length, KL and entropy.

    Raises:
        ValueError: if a key is not in the file, there is nothing to plot, or matplotlib is not installed.
    """
    path = Path(metrics_jsonl)
    run = RecordedRun(path.parent, read_about(path.parent))
    run.__dict__["metrics"] = read_metrics(path)  # of a file with any name
    return _save([run], [""], out_png, keys, run.title if run.about else "")


def save_comparison(
    runs: Sequence[RecordedRun], out_png: str | Path, keys: Sequence[str] | None = None, names: Sequence[str] = ()
) -> Path:
    """Plot the same metrics of several runs into a PNG and return its path. The legend is `names`, or what differs.
    Raises ValueError as `save_curves`."""
    algorithms = {run.algorithm for run in runs}
    models = {run.model for run in runs}
    title = " · ".join(name for names in (algorithms, models) if len(names) == 1 for name in names - {"unknown"})
    return _save(runs, names or labels(runs), out_png, keys, title)


def _save(
    runs: Sequence[RecordedRun], names: Sequence[str], out_png: str | Path, keys: Sequence[str] | None, title: str
) -> Path:
    panels, names, title = _panels(runs, keys), [_escape_text(name) for name in names], _escape_text(title)
    try:  # without pyplot, which has global state and may need a display
        matplotlib = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ValueError("plotting needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = matplotlib.Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for index, (axis, (panel, metric)) in enumerate(zip(axes, panels.items())):
        plotted: list[float] = []
        for color, (run, name) in enumerate(zip(runs, names)):
            series = next((run.metrics[key] for key in metric if key in run.metrics), None)
            if series:
                steps, values = zip(*series)
                faint, mean = None if name else "each step", name or f"mean of {CENTRED} steps"
                axis.plot(steps, values, color=f"C{color}", alpha=0.3, linewidth=1, label=faint)
                axis.plot(steps, centred_mean(values), color=f"C{color}", linewidth=2, label=mean)
                plotted += values
            if index == 0 and keys is None:
                plotted += _draw_validation(axis, run, color, name)
        _finish(axis, panel, plotted)
    # below the panels, so that it covers no line
    handles, texts = axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=min(4, len(texts)), fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10)
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, dpi=120)
    return out_png


def _panels(runs: Sequence[RecordedRun], keys: Sequence[str] | None) -> Mapping[str, tuple[str, ...]]:
    """Title -> names of the metric. Raises ValueError if a key is missing, or nothing can be plotted."""
    present = {name for run in runs for name in run.metrics}
    files = ", ".join(str(run.folder / "metrics.jsonl") for run in runs)
    if keys is not None:
        missing = [key for key in keys if key not in present]
        if missing:
            raise ValueError(f"{files} has no {missing[0]!r}; it has: {', '.join(sorted(present)) or 'nothing'}")
        return {key: (key,) for key in keys}
    panels = {title: names for title, names in PANELS.items() if present.intersection(names)}
    if not panels:
        raise ValueError(f"{files} has nothing to plot: expected one of {sum(PANELS.values(), ())}")
    return panels


def _draw_validation(axis: Any, run: RecordedRun, color: int, name: str) -> list[float]:
    """Plot the validation results, and return their values."""
    plotted: list[float] = []
    for i, metric in enumerate(run.validation_names):
        steps, values = zip(*run.metrics[metric])
        label = _escape_text(run.validation_label(metric))
        # two points do not make a trend, so they are not joined
        line = ":" if len(steps) > 2 else ""
        style = {"color": f"C{color if name else i + 1}", "marker": "osD^v"[i % 5], "markersize": 5, "linewidth": 1}
        axis.plot(steps, values, linestyle=line, label=f"{name}, {label}" if name else label, **style)
        plotted += values
    return plotted


def _finish(axis: Any, title: str, values: Sequence[float]) -> None:
    """Title, labels, and limits that outliers do not stretch."""
    axis.set_title(_escape_text(title), fontsize=10)
    axis.set_xlabel("step")
    axis.locator_params("x", integer=True)
    axis.grid(alpha=0.25)
    limits = robust_limits(values)
    if limits:
        axis.set_ylim(*limits)
        outside = [value for value in values if not limits[0] <= value <= limits[1]]
        text = f"{len(outside)} outside, to {max(outside, key=abs):.3g}"
        axis.text(0.98, 0.97, text, transform=axis.transAxes, ha="right", va="top", fontsize=7, color="0.4")


def _escape_text(text: str) -> str:
    """A text for a plot, without formulas, which `$` begins, and control characters."""
    return printable(text).replace("$", r"\$")
