"""The step of the quickstart, compared with an earlier commit: what generality that is switched off costs.

    python benchmarks/step_cost.py --out benchmarks/results/step_cost_cpu.json    # any machine, a clone with history

Both run the same command, in turns, on one thread of a CPU. Seconds are processor time of the operators, medians over
the steps after the first three; ratios are medians over the pairs of runs. Exit status 1 if a step takes more than
--limit times as long as at the earlier commit.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = "35207241"
#: runs a script with processor time for the clock of the operators
PROGRAM = """
import runpy, sys, time
time.perf_counter = time.process_time
import torch
torch.set_num_threads(1)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def measure(tree: Path, out: Path, steps: int) -> dict[str, float]:
    """Median seconds of each operator of a run of the code in `tree`."""
    command = [sys.executable, "-c", PROGRAM, "examples/quickstart/run.py", f"--steps={steps}", f"--out={out}"]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "rl" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if "timing_s/step" in line][3:]
    names = {name for line in found for name in line if name.startswith("timing_s/")}
    return {n.removeprefix("timing_s/"): statistics.median(line.get(n, 0.0) for line in found) for n in sorted(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="the earlier commit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--limit", type=float, default=1.05)
    parser.add_argument("--out", type=Path, help="also write the record to this file")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", folder / "before", args.base], check=True, capture_output=True)
        try:
            for i in range(args.repeats):
                for key, tree in (("before", folder / "before"), ("now", ROOT)):
                    runs[key].append(measure(tree, folder / f"{key}_{i}", args.steps))
                    print(key, {name: round(seconds, 4) for name, seconds in runs[key][-1].items()}, flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", folder / "before"], check=True)
    operators = sorted({name for run in runs["now"] for name in run})
    seconds = {
        key: {name: round(statistics.median(run.get(name, 0.0) for run in found), 4) for name in operators}
        for key, found in runs.items()
    }
    ratio = statistics.median(now["step"] / before["step"] for before, now in zip(runs["before"], runs["now"]))
    record = {"command": " ".join(["python benchmarks/step_cost.py", *sys.argv[1:]]), "base": args.base}
    record |= {"python": platform.python_version(), "torch": version("torch"), "ratio": round(ratio, 3), **seconds}
    print(json.dumps(record))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(ratio > args.limit))


if __name__ == "__main__":
    main()
