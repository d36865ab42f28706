"""From the runs of benchmarks/learning.py to docs/algorithms.md: tables of figures, and a picture of each algorithm.

    python benchmarks/learning_page.py [RUNS ...]

RUNS are files of JSON lines (OUT/runs.jsonl) that are added to benchmarks/results/learning.jsonl first; a run that is
there already gives way to the newer one. Written are docs/curves/<task>-<algorithm>.png and what stands in the page
between `<!-- learning: TASK -->` and `<!-- end -->`.
"""

import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning import THRESHOLD, Curve, draw, read_runs, spread, summary

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning.jsonl"
PAGE = ROOT / "docs" / "algorithms.md"
CURVES = ROOT / "docs" / "curves"
_BLOCK = re.compile(r"(<!-- learning: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def by_algorithm(runs: list[Curve], task: str, shuffled: bool = False) -> dict[str, list[Curve]]:
    """The runs of a task, in the order of their algorithms' first ones."""
    found: dict[str, list[Curve]] = {}
    for run in runs:
        if (run.task, run.shuffled) == (task, shuffled):
            found.setdefault(run.algorithm, []).append(run)
    return {name: sorted(curves, key=lambda c: c.seed) for name, curves in found.items()}


def table(runs: list[Curve], task: str) -> str:
    """Markdown: a row for each algorithm, fewest responses to the threshold first."""
    controls, threshold = by_algorithm(runs, task, shuffled=True), THRESHOLD[task]
    rows = []
    for name, curves in by_algorithm(runs, task).items():
        found = summary(curves, threshold)
        needed = found[f"responses_to_{threshold}"]
        cells = [
            f"[`{name}`](curves/{task}-{name}.png)",
            _range(needed, "{:,.0f}"),
            f"{found['first_reward'][0]:.2f} -> {_range(found['last_reward'], '{:.2f}')}",
            _range(found["accuracy"], "{:.2f}"),
            f"{spread(controls[name], lambda c: c.accuracy[-1][1])[0]:.2f}" if name in controls else "",
            f"{min(curve.cpu_seconds or curve.seconds for curve in curves):.0f}",
            ", ".join(map(str, found["seeds"])),
        ]
        rows.append((needed[0] or math.inf, -found["last_reward"][0], cells))
    head = [
        "algorithm",
        f"responses to a mean reward of {threshold}",
        "reward, first and last 10 steps",
        "greedy accuracy",
        "with shuffled rewards",
        "seconds",
        "seeds",
    ]
    lines = [head, ["---"] * len(head), *(cells for *_, cells in sorted(rows))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _range(found: list[float | None], form: str) -> str:
    """median (lowest to highest); one number where they are the same."""
    median, low, high = ("never" if value is None else form.format(value) for value in found)
    return median if low == high else f"{median} ({low} to {high})"


def page(text: str, runs: list[Curve]) -> str:
    """The page with its tables made anew."""
    return _BLOCK.sub(lambda block: block[1] + "\n" + table(runs, block[2]) + "\n" + block[3], text)


def main() -> None:
    runs = {run.run: run for path in (RESULTS, *map(Path, sys.argv[1:])) for run in read_runs(path)}
    RESULTS.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs.values()))
    PAGE.write_text(page(PAGE.read_text(), list(runs.values())))
    CURVES.mkdir(exist_ok=True)
    for task in {run.task for run in runs.values()}:
        controls = by_algorithm(list(runs.values()), task, shuffled=True)
        for name, curves in by_algorithm(list(runs.values()), task).items():
            draw([*curves, *controls.get(name, [])], CURVES / f"{task}-{name}.png")


if __name__ == "__main__":
    main()
