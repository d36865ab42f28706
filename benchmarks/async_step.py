"""Compare synchronous and asynchronous GRPO on the same devices, with responses of log-normal length.

    python benchmarks/async_step.py                                   # 2 GPUs: 0.5B, 32 prompts x 8, 64 + 2048 tokens
    python benchmarks/async_step.py --suite cpu                       # 2 CPU processes: 0.43 M parameters
    python benchmarks/async_step.py --variants colocated,separate,async --max-staleness 2

Variants, which run one after another in separate processes:

- colocated: synchronous; both devices generate, and then both train.
- separate: synchronous, one device trains and one generates (trainer.async.max_staleness=0).
- async: the same devices as `separate`, with --max-staleness.

The model has random weights and nothing is downloaded. The length of each response is drawn from a log-normal
distribution (median 1/8 of the maximum, sigma 1, cut at the maximum) by the sample's id, so that all variants generate
and train the same numbers of tokens. One JSON line per variant and one that compares them: `samples_per_second` is over
the wall time of the steps after the warm-up; `staleness` counts the samples of these steps by staleness; `medians` are
seconds of a step: for which training waited for responses, of the update, of the weight sync, and of all operators.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from grpo_step import Work, make_inputs, task_overrides  # noqa: E402

SUITES = {
    "gpu": Work(896, 4864, 24, 14, 2, 151936, True, prompts=32, samples=8, prompt=64, new=2048),  # Qwen2.5-0.5B
    "cpu": Work(128, 256, 2, 4, 2, 553, False, prompts=8, samples=4, prompt=16, new=256),
}
SEPARATE = ["placement.actor_devices=[0]", "placement.rollout_devices=[1]"]
VARIANTS = {"colocated": [], "separate": SEPARATE, "async": SEPARATE}
#: what `medians` has -> the operators whose seconds it is the sum of
PHASES = {
    "wait": ("gen", "buffer"),
    "update_actor": ("update_actor",),
    "sync_weights": ("sync_weights", "sleep_rollout"),
    "step": ("step",),
}


def overrides(work: Work, folder: Path, args: argparse.Namespace) -> list[str]:
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    staleness = args.max_staleness if args.child == "async" else 0
    return [
        *task_overrides(work, folder),
        f"imports=[{ROOT}/benchmarks/lognormal_loop.py]",
        f"{rollout}agent.default_agent_loop=lognormal",
        f"{actor}ppo_mini_batch_size={work.prompts}",
        f"{actor}optim.lr=1e-6",
        f"reward.custom_reward_function.path={ROOT}/benchmarks/grpo_step.py",
        "reward.isolation=none",
        # further steps keep the devices busy until the last measured step ends
        f"trainer.total_training_steps={args.steps + staleness + 1}",
        f"trainer.default_local_dir={folder / args.child}",
        "trainer.logger=[jsonl]",
        "trainer.val_before_train=false",
        "trainer.save_at_end=false",
        "trainer.n_gpus_per_node=2",
        f"trainer.async.max_staleness={staleness}",
        *VARIANTS[args.child],
        *(["trainer.device=cpu"] if args.suite == "cpu" else []),
        *args.set,
    ]


def run_variant(work: Work, folder: Path, args: argparse.Namespace) -> dict:
    from verl.trainer.local_trainer import LocalPPOTrainer

    trainer = LocalPPOTrainer(overrides=overrides(work, folder, args))
    ends: list[float] = []
    reports: list[dict[str, float]] = []

    def record(report) -> None:
        ends.append(time.perf_counter())
        reports.append(report.metrics)

    trainer.on_step.append(record)
    trainer.fit()
    measured = reports[args.warm_up : args.steps]
    ends = ends[args.warm_up - 1 : args.steps]
    seconds = ends[-1] - ends[0]
    staleness = [sum(int(m.get(f"async/staleness_{k}", 0)) for m in measured) for k in range(args.max_staleness + 1)]
    medians = {
        phase: round(statistics.median(sum(m.get(f"timing_s/{name}", 0.0) for name in names) for m in measured), 3)
        for phase, names in PHASES.items()
    }
    return {
        "benchmark": "async_step",
        "variant": args.child,
        "max_staleness": args.max_staleness if args.child == "async" else 0,
        **asdict(work),
        "steps": len(measured),
        "samples_per_second": round(len(measured) * work.prompts * work.samples / seconds, 3),
        "seconds_per_step": round(seconds / len(measured), 3),
        "seconds_of_steps": [round(b - a, 3) for a, b in pairwise(ends)],
        "new_tokens": round(statistics.mean(m["response_length/mean"] for m in measured), 1),
        "longest": max(m["response_length/max"] for m in measured),
        "staleness": staleness if args.child == "async" else None,
        "partial_samples": sum(int(m.get("async/partial", 0)) for m in measured),
        "dropped_groups": sum(int(m.get("async/dropped", 0)) for m in measured),
        "medians": medians,
    }


def facts(args: argparse.Namespace) -> dict:
    import torch

    gpu = torch.cuda.is_available()
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {
        "command": " ".join(["python", "benchmarks/async_step.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if gpu and args.suite == "gpu" else platform.processor() or "CPU",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="gpu")
    parser.add_argument("--variants", default="colocated,async", help=f"of {', '.join(VARIANTS)}, separated by commas")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="steps per variant, including the warm-up")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--prompts", type=int, help="prompts per step")
    parser.add_argument("--new", type=int, help="maximum response length")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of the trainer")
    parser.add_argument("--out", type=Path, help="also write the record to this file")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    replaced = {name: value for name in ("prompts", "new") if (value := vars(args)[name]) is not None}
    work = replace(SUITES[args.suite], **replaced)
    if args.child:
        line = run_variant(work, args.folder, args)
        (args.folder / f"{args.child}.json").write_text(json.dumps(line), encoding="utf-8")
        return
    record = {"facts": facts(args), "lines": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_inputs(work, folder, work.prompts * (args.steps + args.max_staleness + 1))
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        for variant in args.variants.split(","):
            child = [sys.executable, __file__, *sys.argv[1:], "--child", variant, "--folder", str(folder)]
            subprocess.run(child, check=True, stdout=sys.stderr, env=os.environ | {"PYTHONPATH": path})
            record["lines"].append(json.loads((folder / f"{variant}.json").read_text(encoding="utf-8")))
            print(json.dumps(record["lines"][-1]), flush=True)
    speed = {line["variant"]: line["samples_per_second"] for line in record["lines"]}
    if "async" in speed:
        fast = speed.pop("async")
        compared = {
            "benchmark": "async_step_compared",
            "max_staleness": args.max_staleness,
            **{f"faster_than_{name}": round(fast / other, 2) for name, other in speed.items()},
            "staleness": next(line["staleness"] for line in record["lines"] if line["variant"] == "async"),
            "medians": {line["variant"]: line["medians"] for line in record["lines"]},
        }
        record["lines"].append(compared)
        print(json.dumps(compared), flush=True)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
