"""Writes the results of benchmarks/learning.py to docs/internals/learning_curves.md: tables and plots.

    python benchmarks/learning_page.py [RUNS ...]

RUNS are JSON lines files (OUT/runs.jsonl) that are first added to benchmarks/results/learning.jsonl; a newer run
replaces an older one. Updates the tables of the page between `<!-- learning: TASK -->` and `<!-- end -->`,
docs/curves/<task>-<algorithm>.png for the tasks of CURVE_OF_EACH, and docs/curves/<task>.png for the others and for
countdown3: all algorithms in one plot, the median over their seeds.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning import THRESHOLD, Curve, draw, read_runs, spread, summary
from verl.tracking.curves import WINDOW, moving_mean

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning.jsonl"
PAGE = ROOT / "docs" / "internals" / "learning_curves.md"
CURVES = ROOT / "docs" / "curves"
CURVE_OF_EACH = ("reverse", "countdown3")
TOGETHER = ("countdown3", "sort", "digit")
#: the steps whose sampled results a table shows
SHOWN_STEPS = (100, 300)
_BLOCK = re.compile(r"(<!-- learning: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def by_algorithm(runs: list[Curve], task: str, shuffled: bool = False) -> dict[str, list[Curve]]:
    """The runs of a task, ordered by the first run of each algorithm."""
    curves_by_name: dict[str, list[Curve]] = {}
    for run in runs:
        if (run.task, run.shuffled) == (task, shuffled):
            curves_by_name.setdefault(run.algorithm, []).append(run)
    return {name: sorted(curves, key=lambda c: c.seed) for name, curves in curves_by_name.items()}


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(runs: list[Curve], task: str) -> str:
    """Markdown table: a row per algorithm, fewest responses to the threshold first."""
    controls, threshold = by_algorithm(runs, task, shuffled=True), THRESHOLD[task]
    rows = []
    for name, curves in by_algorithm(runs, task).items():
        figures = summary(curves, threshold)
        needed = figures[f"responses_to_{threshold}"]
        cells = [
            f"[`{name}`](../curves/{task}-{name}.png)" if task in CURVE_OF_EACH else f"`{name}`",
            _range(needed, "{:,.0f}"),
            f"{figures['first_reward'][0]:.2f} -> {_range(figures['last_reward'], '{:.2f}')}",
            _sampled(curves, 1),
            _sampled(curves, 2),
            _range(figures["accuracy"], "{:.2f}"),
            _range(spread(curves, lambda c: mean(c.entropy[-WINDOW:])), "{:.2f}") if curves[0].entropy else "",
            f"{spread(controls[name], lambda c: c.accuracy[-1][1])[0]:.2f}" if name in controls else "",
            f"{len(curves)}",
        ]
        rows.append((needed[0] or math.inf, -figures["last_reward"][0], cells))
    steps = " and ".join(map(str, sorted({step for run in runs if run.task == task for step in _shown(run)})))
    head = [
        "algorithm",
        f"responses to a mean reward of {threshold}",
        "reward, first and last 10 steps",
        f"sampled accuracy after {steps} steps",
        "pass@8",
        "greedy accuracy",
        "entropy, last 10 steps",
        "with shuffled rewards",
        "seeds",
    ]
    lines = [head, ["---"] * len(head), *(cells for *_, cells in sorted(rows))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(curve: Curve) -> list[int]:
    """The steps whose sampled results the table shows."""
    return [step for step, *_ in curve.sampled if step in SHOWN_STEPS]


def _sampled(curves: list[Curve], column: int) -> str:
    """Sampled results at each step shown: the median, and the range at the last one."""
    steps = _shown(curves[0])
    spreads = [
        spread(curves, lambda c, step=step: {s: row for s, *row in c.sampled}[step][column - 1]) for step in steps
    ]
    return ", ".join(
        [*(f"{found[0]:.2f}" for found in spreads[:-1]), *(_range(found, "{:.2f}") for found in spreads[-1:])]
    )


def _range(bounds: list[float | None], form: str) -> str:
    """median (minimum to maximum); one number if they are equal."""
    median, low, high = ("never" if value is None else form.format(value) for value in bounds)
    return median if low == high else f"{median} ({low} to {high})"


def page(text: str, runs: list[Curve]) -> str:
    """The page with updated tables."""
    return _BLOCK.sub(lambda block: block[1] + "\n" + table(runs, block[2]) + "\n" + block[3], text)


# ---- pictures -------------------------------------------------------------------------------------------------------


def pictures(runs: list[Curve]) -> dict[str, Callable[[Path], None]]:
    """file name -> function that plots it."""
    painters: dict[str, Callable[[Path], None]] = {}
    for task in {run.task for run in runs}:
        algorithms, controls = by_algorithm(runs, task), by_algorithm(runs, task, shuffled=True)
        if task in CURVE_OF_EACH:
            for name, curves in algorithms.items():
                drawn = [*curves, *controls.get(name, [])]
                painters[f"{task}-{name}.png"] = lambda path, drawn=drawn: draw(drawn, path)
        if task in TOGETHER:
            painters[f"{task}.png"] = lambda path, task=task, of=algorithms: draw_together(task, of, path)
    return painters


def draw_together(task: str, algorithms: dict[str, list[Curve]], path: Path) -> None:
    """Plot reward, greedy accuracy and entropy over steps: a line per algorithm, the median over its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for number, (name, curves) in enumerate(sorted(algorithms.items())):
        look = {"label": name, "color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10]}
        panels[0].plot(_median([moving_mean(curve.reward) for curve in curves]), **look)
        steps = [step for step, _ in curves[0].accuracy]
        panels[1].plot(steps, _median([[share for _, share in curve.accuracy] for curve in curves]), **look)
        panels[2].plot(_median([moving_mean(curve.entropy) for curve in curves]), **look)
    for panel, title in zip(panels, (f"{task}: reward, mean of {WINDOW} steps", "greedy accuracy", "entropy")):
        panel.set_title(title, size=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=70)


def _median(lines: Sequence[Sequence[float]]) -> list[float]:
    """The pointwise median of several lines."""
    return [median(values) for values in zip(*lines)]


def main() -> None:
    runs = {run.key: run for path in (RESULTS, *map(Path, sys.argv[1:])) for run in read_runs(path)}
    RESULTS.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs.values()), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), list(runs.values())), encoding="utf-8")
    CURVES.mkdir(exist_ok=True)
    drawn = pictures(list(runs.values()))
    for path in CURVES.iterdir():
        if path.name not in drawn:
            path.unlink()
    for name, draw_to in drawn.items():
        draw_to(CURVES / name)


if __name__ == "__main__":
    main()
