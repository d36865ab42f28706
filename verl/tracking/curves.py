"""Plots of learning curves, from the metrics.jsonl of a run."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path

#: title of a panel -> metrics, of which the first one present is plotted
_PANELS: dict[str, tuple[str, ...]] = {
    "score": ("critic/score/mean",),
    "response length (tokens)": ("response_length/mean",),
    "KL to the reference": ("actor/ref_kl", "actor/kl", "actor/reward_kl_penalty"),
    "entropy": ("actor/entropy", "actor/entropy_loss"),
}

#: steps over which the bold line is averaged
WINDOW = 10


def moving_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Trailing mean over at most `window` values."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def read_metrics(metrics_jsonl: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Return name -> [(step, value)], sorted by step. Values that were not finite are skipped."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in Path(metrics_jsonl).read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        record.pop("time")
        for name, value in record.items():
            if value is not None:
                found.setdefault(name, []).append((step, value))
    return found


def save_curves(metrics_jsonl: str | Path, out_png: str | Path, keys: Sequence[str] | None = None) -> Path:
    """Plot metrics over steps into a PNG and return its path.

    Each panel shows the values and their mean over the last 10 steps; the first one also shows validation results.

    Args:
        metrics_jsonl: file written by the jsonl tracker.
        out_png: file to write.
        keys: one panel per metric, instead of score, length, KL and entropy.

    Raises:
        ValueError: if a key is not in the file, there is nothing to plot, or matplotlib is not installed.
    """
    found = read_metrics(metrics_jsonl)
    if keys is not None:
        missing = [key for key in keys if key not in found]
        if missing:
            raise ValueError(f"{metrics_jsonl} has no {missing[0]!r}; it has: {', '.join(sorted(found)) or 'nothing'}")
        panels = {key: key for key in keys}
    else:
        present = {title: [name for name in names if name in found] for title, names in _PANELS.items()}
        panels = {title: names[0] for title, names in present.items() if names}
    if not panels:
        raise ValueError(f"{metrics_jsonl} has nothing to plot: expected one of {sum(_PANELS.values(), ())}")
    figure = _figure(len(panels))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, name) in zip(axes, panels.items()):
        steps, values = zip(*found[name])
        axis.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
        axis.plot(steps, moving_mean(values), color="tab:blue", linewidth=2, label=f"mean of {WINDOW}")
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
    for i, name in enumerate(sorted(name for name in found if name.startswith("val-core/")), start=1):
        axes[0].plot(*zip(*found[name]), f"C{i}o--", linewidth=1, markersize=5, label=name.removeprefix("val-core/"))
    axes[0].legend(fontsize=8)
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, dpi=120)
    return out_png


def _figure(panels: int):
    """Create a figure without pyplot, which has global state and may need a display."""
    try:
        matplotlib = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ValueError("plotting needs matplotlib, which is not installed: pip install matplotlib") from error
    return matplotlib.Figure(figsize=(4.2 * panels, 3.4), layout="constrained")
