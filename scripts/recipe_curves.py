"""The pictures of the recipes, from their records: python scripts/recipe_curves.py

A record, `examples/recipes/NAME/results/record.json`, has "metric", and "runs" with "seed", "rewards" (of each step),
and the metric "before" and "after" training. It writes curve.png beside it.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

import matplotlib.pyplot as plt

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "recipes"


def draw(record: Path) -> Path:
    """The reward over the steps, and the metric before and after, of all seeds. Returns the picture."""
    content = json.loads(record.read_text(encoding="utf-8"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", width_ratios=[2, 1])
    for run in content["runs"]:
        label = f"seed {run['seed']}"
        left.plot(range(1, len(run["rewards"]) + 1), run["rewards"], label=label)
        right.plot(["before", "after"], [run["before"], run["after"]], marker="o", label=label)
    left.set(title="mean reward of a step", xlabel="step")
    right.set(title=content["metric"], ylim=(0, 1))
    right.title.set_fontsize(9)
    left.legend(frameon=False)
    for plot in (left, right):
        plot.spines[["top", "right"]].set_visible(False)
    picture = record.with_name("curve.png")
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    return picture


if __name__ == "__main__":
    for path in sorted(RECIPES.glob("*/results/record.json")):
        print(draw(path))
