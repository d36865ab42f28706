"""Memory, descriptors, threads, processes and disk of a long run.

    python benchmarks/soak.py --suite local --steps 20000        # one process
    python benchmarks/soak.py --suite processes --steps 5000     # 2 processes, rewards in worker processes
    python benchmarks/soak.py --suite images --steps 600         # one process, images that threads read ahead

Trains the tiny job of `tiny_job.py` with checkpoints every 50 steps (2 are kept), validation every 100 steps, and the
trackers jsonl and tensorboard. Every --every steps it records this process and all its descendants. A slope is that of
a least-squares line over the samples after the warm-up, per 1,000 steps; `drift` is the mean of the last fifth of them
less that of the first fifth. Logs grow with the steps; checkpoints must not.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tiny_job import make_job, settings  # noqa: E402

MIB = 2**20
SUITES = {
    "local": [],
    "processes": [
        *("trainer.n_gpus_per_node=2", "reward.isolation=process", "reward.reward_manager.name=prime"),
        "reward.reward_kwargs.num_processes=2",
    ],
    "images": [
        *("data.max_prompt_length=64", "data.max_response_length=4", "data.dataloader_num_workers=2"),
        *("data.val_max_samples=32", "data.val_batch_size=16"),
    ],
}


def sample(step: int, run: Path) -> dict[str, float]:
    """What this process and its descendants use now."""
    me = psutil.Process()
    children = me.children(recursive=True)
    record = {
        "step": step,
        "rss_mib": me.memory_info().rss / MIB,
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "children": len(children),
        "children_rss_mib": sum(child.memory_info().rss for child in children) / MIB,
        "children_descriptors": sum(child.num_fds() for child in children),
        "children_threads": sum(child.num_threads() for child in children),
    }
    files = [path for path in run.rglob("*") if path.is_file()]
    saved = [path for path in files if "global_step_" in str(path.relative_to(run))]
    record["checkpoints_mib"] = sum(path.stat().st_size for path in saved) / MIB
    record["logs_mib"] = sum(path.stat().st_size for path in files if path not in set(saved)) / MIB
    return {name: round(value, 3) for name, value in record.items()}


def trends(samples: Sequence[dict[str, float]], warm_up: int) -> dict[str, dict[str, float]]:
    """Name -> its first and last value after the warm-up, slope per 1,000 steps, and drift."""
    measured = [record for record in samples if record["step"] >= warm_up]
    if len(measured) < 5:
        return {}
    steps, fifth, figures = [record["step"] for record in measured], len(measured) // 5, {}
    for name in measured[0]:
        if name == "step":
            continue
        values = [record[name] for record in measured]
        slope = statistics.linear_regression(steps, values).slope
        drift = statistics.mean(values[-fifth:]) - statistics.mean(values[:fifth])
        figures[name] = {"first": values[0], "last": values[-1], "per_1000_steps": slope * 1000, "drift": drift}
    return {name: {key: round(value, 3) for key, value in figure.items()} for name, figure in figures.items()}


def image_job(folder: Path) -> list[str]:
    """Write a model that reads images, and images. Returns the overrides of a run with them."""
    from examples.data_preprocess import count_shapes
    from examples.quickstart.make_tiny_vl_model import tiny_vl_model

    tiny_vl_model(folder / "model")
    count_shapes.main(["--save_dir", str(folder)])
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'test.parquet'}",
    ]


def soak(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    from verl.trainer.local_trainer import LocalPPOTrainer

    run, start, samples = folder / "run", time.monotonic(), []
    fixed = [
        *("algorithm.name=grpo", f"trainer.total_training_steps={args.steps}", "trainer.logger=[jsonl,tensorboard]"),
        *("trainer.save_freq=50", "trainer.max_actor_ckpt_to_keep=2", "trainer.test_freq=100"),
        *("trainer.log_operators=false", "trainer.log_level=warning", "trainer.total_epochs=100000"),
    ]
    job = make_job(folder / "job")
    further = [*SUITES[name], *(image_job(folder / "images") if name == "images" else ())]
    trainer = LocalPPOTrainer(overrides=settings(job, run, *fixed, *further))

    def result() -> dict[str, Any]:
        info = {"suite": name, "steps": trainer.global_step, "asked": args.steps, "warm_up": args.warm_up}
        info |= {"seconds": round(time.monotonic() - start, 1), "torch": torch.__version__}
        info |= {"python": platform.python_version(), "cores": os.cpu_count()}
        return info | {"trends": trends(samples, args.warm_up), "samples": samples[:: max(1, len(samples) // 40)]}

    def watch(report: Any) -> None:
        if report.step % args.every == 0:
            samples.append(sample(report.step, run))
            if len(samples) % 10 == 0:
                write(args.out, name, result())
        if args.seconds and time.monotonic() - start > args.seconds:
            trainer.total_steps = report.step  # the last one

    trainer.on_step.append(watch)
    trainer.fit()
    trainer.shutdown()
    return result()


def write(out: Path, name: str, line: dict[str, Any]) -> None:
    """Replace the result of a suite in a file."""
    records = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    out.write_text(json.dumps(records | {name: line}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="local")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--warm-up", type=int, default=200, help="steps")
    parser.add_argument("--every", type=int, default=25, help="steps between two samples")
    parser.add_argument("--seconds", type=float, help="end after this time")
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        line = soak(args.suite, args, Path(folder))
    write(args.out, args.suite, line)
    print(json.dumps({key: value for key, value in line.items() if key != "samples"}))


if __name__ == "__main__":
    main()
