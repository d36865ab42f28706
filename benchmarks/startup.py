"""Time from the start of the process to the first sampled token. One JSON line per measurement.

    python benchmarks/startup.py                         # 0.43M parameters on a CPU, 0.5B on a GPU
    python benchmarks/startup.py --shape 7B --rows 256

A new process imports torch and transformers, creates a model with random weights on the device, and generates. Seconds
are measured by the parent: `first_token` is the total, `generate` the last phase, including kernel compilation.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import sys, time
sys.path[:0] = [{root!r}, {root!r} + "/benchmarks"]
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from rollout import SHAPES
from verl.rollout.base import SamplingParams, make_requests
from verl.rollout.native.engine import NativeRollout
print("imported", time.time(), flush=True)
with torch.device({device!r}):
    dtype = getattr(torch, {dtype!r})
    module = Qwen2ForCausalLM._from_config(Qwen2Config(**SHAPES[{shape!r}]), dtype=dtype)
engine = NativeRollout(module)
print("model", time.time(), flush=True)
engine.generate(make_requests([list(range(1, 129))] * {rows}, SamplingParams(1, ())))
print("first_token", time.time(), flush=True)
engine.generate(make_requests([list(range(1, 129))] * {rows}, SamplingParams(32, (), ignore_eos=True)))
print("32_tokens", time.time(), flush=True)
"""


def once(args: argparse.Namespace) -> dict[str, float]:
    """Seconds from the start of a process to each mark that it prints."""
    code = CHILD.format(root=str(ROOT), device=args.device, dtype=args.dtype, shape=args.shape, rows=args.rows)
    start = time.time()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, encoding="utf-8")
    marks = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    return {name: float(marks[name]) - start for name in ("imported", "model", "first_token", "32_tokens")}


def main() -> None:
    import torch

    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B" if gpu else "0.43M")
    parser.add_argument("--rows", type=int, default=256 if gpu else 64)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    runs = [once(args) for _ in range(args.repeats)]
    seconds = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    line = {"benchmark": "startup", "shape": args.shape, "rows": args.rows, "device": args.device, "dtype": args.dtype}
    line |= {"seconds": seconds, "first_run": {k: round(v, 2) for k, v in runs[0].items()}}
    line |= {"torch": torch.__version__, "command": " ".join(["python", *sys.argv])}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
