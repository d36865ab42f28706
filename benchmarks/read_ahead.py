"""Step time with and without threads that prepare the next batch (data.dataloader_num_workers): photos, a tiny model.

    python benchmarks/read_ahead.py [--steps 20] [--threads 2] [--prompts 16] [--out FILE]

Two runs in one process make five steps each in turn, so that both see the same load of the machine. Every prompt has a
JPEG of 1024 x 768 pixels, which `data.max_pixels` shrinks. Prints one JSON line with medians: seconds of a step, and of
its operator `prompts`, which is the wait for the data.
"""

import argparse
import json
import logging
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from PIL import Image

from verl import PPOTrainer
from verl.data.prefetch import default_workers

_BLOCK = 4  # steps that count of five in a row
MODEL = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "make_tiny_vl_model.py"


def write_photos(folder: Path, rows: int) -> None:
    draw = random.Random(0)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for row in range(rows):
            small = Image.frombytes("RGB", (64, 48), draw.randbytes(64 * 48 * 3))
            small.resize((1024, 768)).save(folder / f"{row}.jpg")
            file.write(json.dumps({"prompt": "<image>?", "images": [f"{row}.jpg"], "answer": "a"}) + "\n")


def make_trainer(folder: Path, threads: int, prompts: int) -> PPOTrainer:
    return PPOTrainer(
        {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": str(folder / "train.jsonl"),
            "data.train_batch_size": prompts,
            "data.max_prompt_length": 128,
            "data.max_response_length": 8,
            "data.max_pixels": 64 * 48,
            "data.dataloader_num_workers": threads,
            "actor_rollout_ref.model.path": str(folder / "model"),
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
            "reward.isolation": "none",
            "reward.reward_function": "accuracy_reward",
            "trainer.default_local_dir": str(folder / f"run-{threads}"),
            "trainer.logger": ["jsonl"],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of each run that count")
    parser.add_argument("--threads", type=int, default=default_workers())
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--out", type=Path, help="file that the JSON line is added to")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, MODEL, "--out", folder / "model"], check=True, capture_output=True)
        write_photos(folder, 16 * args.prompts)
        trainers = {threads: make_trainer(folder, threads, args.prompts) for threads in (0, args.threads)}
        reports = {threads: [] for threads in trainers}
        for block in range(1 + -(-args.steps // _BLOCK)):  # one to warm up
            for threads, trainer in trainers.items():
                step_metrics = [trainer.step().metrics for _ in range(1 + _BLOCK)]
                reports[threads] += step_metrics[1:] if block else []  # the first step of a block waits for its batch
                trainer.source.close()
        for trainer in trainers.values():
            trainer.shutdown()
    figures = {
        f"{threads} threads": {
            "step_s": round(statistics.median(m["timing_s/step"] for m in step_metrics), 4),
            "prompts_s": round(statistics.median(m["timing_s/prompts"] for m in step_metrics), 4),
        }
        for threads, step_metrics in reports.items()
    }
    without, threaded = figures.values()
    line = {
        "prompts": args.prompts,
        "steps": len(next(iter(reports.values()))),
        **figures,
        "ratio": round(threaded["step_s"] / without["step_s"], 3),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }
    print(json.dumps(line))
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
