"""The picture of docs/debug_rewards.md: python scripts/hacking_figure.py RIGHT HACKED [docs/images]

RIGHT is the GRPO run of docs/tutorial.md with trainer.test_freq=10, and HACKED the same with the reward of
docs/debug_rewards.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

import matplotlib.pyplot as plt

from verl.tracking.runs import read_metrics

STYLES = {"light": ("#ffffff", "#1f2328"), "dark": ("#0e1117", "#e6edf3")}
CURVES = {
    "score and validation accuracy": {"critic/score/mean": "score", "val-core/sort/acc/mean@1": "validation accuracy"},
    "response length (tokens)": {"response_length/mean": "mean"},
    "KL to the reference": {"actor/ref_kl": "nats per token"},
}


def draw(runs: dict[str, Path], path: Path, background: str, foreground: str) -> None:
    """One row of curves for each run."""
    colors = {name: foreground for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")}
    colors |= {"axes.edgecolor": foreground, "axes.facecolor": background, "figure.facecolor": background}
    with plt.rc_context({**colors, "font.size": 9, "legend.frameon": False}):
        figure, axes = plt.subplots(len(runs), len(CURVES), figsize=(10.5, 5), layout="constrained", sharey="col")
        for (title, folder), row in zip(runs.items(), axes):
            series = read_metrics(folder / "metrics.jsonl")
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
    right, hacked, *out = (Path(argument) for argument in sys.argv[1:])
    for scheme, colors in STYLES.items():
        path = (out[0] if out else Path("docs/images")) / f"hacking-{scheme}.png"
        draw({"right reward": right, "partial credit": hacked}, path, *colors)
