"""The pictures of the recipes, from their records: python scripts/recipe_curves.py

A record, `examples/recipes/NAME/results/record.json`, has "metric", and "runs" with "seed", a curve (of each step), and
the metric "before" and "after" training; runs of other settings have a "variant". It writes curve-light.png and
curve-dark.png beside it.
"""

import json
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not

import matplotlib.pyplot as plt

from verl.tracking.curves import moving_mean

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "recipes"
#: what is drawn on the left: the first curve that the runs have
CURVES = {"rewards": "mean reward of a step", "pair_accuracy": "share of ordered pairs of a step", "sft_nll": "loss"}
_DARK = {f"{part}.facecolor": "#0e1117" for part in ("figure", "axes", "savefig")}
_DARK |= {"axes.prop_cycle": plt.rcParamsDefault["axes.prop_cycle"]}
STYLES = {"light": ["default"], "dark": ["dark_background", _DARK]}


def draw(record: Path, style: str) -> Path:
    """The curve over the steps, and the metric before and after, of all runs. Returns the picture."""
    content = json.loads(record.read_text(encoding="utf-8"))
    runs = content["runs"]
    curve = next(name for name in CURVES if name in runs[0])
    variants = list(dict.fromkeys(run.get("variant", "") for run in runs))
    with plt.style.context(STYLES[style]):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", width_ratios=[2, 1])
        for i, run in enumerate(runs):
            variant = run.get("variant", "")
            color = f"C{variants.index(variant) if len(variants) > 1 else i}"
            label = f"seed {run['seed']}" if len(variants) == 1 else variant or "the recipe"
            shown = label if label not in left.get_legend_handles_labels()[1] else None
            left.plot(range(1, len(run[curve]) + 1), moving_mean(run[curve], 5), color=color, label=shown)
            right.plot(["before", "after"], [run["before"], run["after"]], color=color, marker="o")
        left.set(title=f"{CURVES[curve]}{', mean of 5' if len(runs[0][curve]) > 20 else ''}", xlabel="step")
        highest = max(max(run["before"], run["after"]) for run in runs)
        right.set(title=textwrap.fill(content["metric"], 34), ylim=(0, max(0.1, 1.1 * highest)))
        right.title.set_fontsize(9)
        left.legend(frameon=False, fontsize=8)
        for plot in (left, right):
            plot.spines[["top", "right"]].set_visible(False)
        picture = record.with_name(f"curve-{style}.png")
        figure.savefig(picture, dpi=110)
        plt.close(figure)
    return picture


if __name__ == "__main__":
    for path in sorted(RECIPES.glob("*/results/record.json")):
        print(*(draw(path, style) for style in STYLES))
