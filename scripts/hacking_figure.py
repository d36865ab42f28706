"""The picture of docs/debug_rewards.md, from its record: python scripts/hacking_figure.py

With the arguments RIGHT HACKED it records two runs first: RIGHT is the GRPO run of docs/tutorial.md, HACKED the same
with the reward of docs/debug_rewards.md and trainer.test_freq=10.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

import matplotlib.pyplot as plt

from verl.tracking.runs import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "reward_hacking_cpu.json"
IMAGES = ROOT / "docs" / "images"
STYLES = {"light": ("#ffffff", "#1f2328"), "dark": ("#0e1117", "#e6edf3")}
CURVES = {
    "score and validation accuracy": {"critic/score/mean": "score", "val-core/sort/acc/mean@1": "validation accuracy"},
    "response length (tokens)": {"response_length/mean": "mean"},
    "KL to the reference": {"actor/ref_kl": "nats per token"},
}


def record(right: Path, hacked: Path) -> None:
    """Write the curves of two runs, rounded to four digits."""
    names = [metric for metrics in CURVES.values() for metric in metrics]
    curves = {}
    for title, run in {"right reward": right, "partial credit": hacked}.items():
        series = read_metrics(run / "metrics.jsonl")
        curves[title] = {name: [[step, round(value, 4)] for step, value in series[name]] for name in names}
    command = "verl train --config sort/grpo.yaml of docs/tutorial.md, and with the reward of docs/debug_rewards.md"
    text = json.dumps({"command": command, "machine": "one CPU core", "runs": curves})
    RECORD.write_text(f"{text}\n", encoding="utf-8")


def draw(path: Path, background: str, foreground: str) -> None:
    """One row of curves for each run."""
    runs = json.loads(RECORD.read_text(encoding="utf-8"))["runs"]
    colors = {name: foreground for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")}
    colors |= {"axes.edgecolor": foreground, "axes.facecolor": background, "figure.facecolor": background}
    with plt.rc_context({**colors, "font.size": 9, "legend.frameon": False}):
        figure, axes = plt.subplots(len(runs), len(CURVES), figsize=(10.5, 5), layout="constrained", sharey="col")
        for (title, series), row in zip(runs.items(), axes):
            for (name, metrics), plot in zip(CURVES.items(), row):
                for metric, label in metrics.items():
                    marker = "o" if metric.startswith("val") else ""
                    plot.plot(*zip(*series[metric]), label=label, marker=marker, markersize=4)
                plot.set_title(f"{title}: {name}", fontsize=9)
                plot.spines[["top", "right"]].set_visible(False)
            row[0].legend()
        figure.savefig(path, dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        record(Path(sys.argv[1]), Path(sys.argv[2]))
    for scheme, style in STYLES.items():
        draw(IMAGES / f"hacking-{scheme}.png", *style)
