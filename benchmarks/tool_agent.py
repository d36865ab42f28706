"""Record the runs of examples/tools/run_multiply.sh: three seeds, each with a control whose rewards are shuffled.

    python benchmarks/tool_agent.py --out benchmarks/results/tool_agent_cpu.json --plot docs/curves/tool_agent

Processor seconds (user and system) are those of the process tree, as the `time` of a shell counts them: of processes
whose parents have waited for them. They depend less on other load than the wall time, which is recorded too.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
REWARD, ACCURACY, CALLS = "critic/score/mean", "val-core/data/acc/mean@1", "rollout/tool_errors"


def run(out: Path, seed: int, is_control: bool, keys: list[str]) -> dict[str, Any]:
    """Run the script once. Returns its curves and seconds."""
    extra = ["algorithm.shuffle_rewards=true"] if is_control else []
    env = {**os.environ, "OUT": str(out), "SEED": str(seed), "PYTHON": sys.executable}
    if is_control:  # from the same warm-up
        env["WARM"] = str(out.parent / f"{seed}-grpo/sft/global_step_160/actor/huggingface")
    shutil.rmtree(out, ignore_errors=True)  # a run that is resumed would not be measured
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["bash", str(ROOT / "examples/tools/run_multiply.sh"), *extra, *keys], env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [json.loads(line) for line in (out / "grpo/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curves = {
        name: [(line["step"], line[name]) for line in lines if name in line] for name in (REWARD, ACCURACY, CALLS)
    }
    return {
        "seed": seed,
        "shuffled_rewards": is_control,
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "wall_seconds": round(time.perf_counter() - start, 1),
        **curves,
    }


def plot(runs: list[dict[str, Any]], name: Path) -> None:
    """Draw the curves, for light and dark pages."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for theme, style, background in (("light", "default", "#ffffff"), ("dark", "dark_background", "#0d1117")):
        with plt.style.context(style):
            figure, axis = plt.subplots(figsize=(7, 3.2), facecolor=background)
            axis.set_facecolor(background)
            for record in runs:
                color = "#8a93a3" if record["shuffled_rewards"] else "#2f81f7"
                steps, values = zip(*record[ACCURACY])
                label = "shuffled rewards" if record["shuffled_rewards"] else "GRPO"
                axis.plot(steps, values, color=color, marker="o", markersize=4, label=label)
                steps, values = zip(*record[REWARD])
                axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.4)
            handles = dict(zip(axis.get_legend_handles_labels()[1], axis.get_legend_handles_labels()[0]))
            axis.legend(handles.values(), handles.keys(), frameon=False)
            axis.set(xlabel="step", ylabel="correct answers", ylim=(-0.02, 1.02))
            axis.spines[["top", "right"]].set_visible(False)
            figure.tight_layout()
            figure.savefig(f"{name}-{theme}.png", dpi=130, facecolor=background)
            plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("outputs/tool_agent"), help="of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the record; its runs of other seeds are kept")
    parser.add_argument("--plot", type=Path, help="beginning of the names of the pictures")
    parser.add_argument("--control", choices=["both", "no", "only"], default="both")
    parser.add_argument("override", nargs="*", metavar="key=value", help="any config key of GRPO")
    args = parser.parse_args()
    runs = json.loads(args.out.read_text(encoding="utf-8"))["runs"] if args.out.exists() else []
    for seed in args.seeds:
        for is_control in {"both": (False, True), "no": (False,), "only": (True,)}[args.control]:
            record = run(
                args.folder / f"{seed}-{'shuffled' if is_control else 'grpo'}", seed, is_control, args.override
            )
            runs = [r for r in runs if (r["seed"], r["shuffled_rewards"]) != (seed, is_control)] + [record]
            runs.sort(key=lambda r: (r["shuffled_rewards"], r["seed"]))
            content = {
                "command": "python benchmarks/tool_agent.py",
                "machine": f"{os.cpu_count()} CPU cores, shared with other work",
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "runs": runs,
            }
            args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
