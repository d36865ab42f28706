"""Where the time of a training step goes: one process, a tiny model, 64 prompts x 8 responses of 8 tokens.

    python benchmarks/local_step.py [--steps 20] [--algorithm grpo] [--rollout hf] [--size tiny]

Prints one JSON line: seconds by phase (medians), tokens per second, and the fraction of a step outside model code.
Model code is the rollout's `generate`, forward and backward passes and the optimizer; the rest (flow, rewards, columns,
metrics, logging) is overhead. `share_outside_modules` is stricter: only the modules' own forward and backward passes
and the optimizer step count as model code, so what transformers' `generate` does around them is overhead too.
"""

import argparse
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from examples.quickstart.tasks import write_task
from examples.quickstart.tiny_model import tiny_model
from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer

SCORER = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "tasks.py"


class Stopwatch:
    """Sums the wall time of wrapped calls by name; nested calls count once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: set[str] = set()

    def wrap(self, name: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            if name in self._inside:
                return function(*args, **kwargs)
            self._inside.add(name)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start
                self._inside.discard(name)

        return timed


def instrument(trainer: LocalPPOTrainer, watch: Stopwatch) -> None:
    """Time the engine calls (`engine`) and the module code inside them (`module`) of every role."""
    seen = set()
    for group in trainer.roles.values():
        worker = group.worker
        if id(worker) in seen:
            continue
        seen.add(id(worker))
        engine = worker.engine
        engine.infer = watch.wrap("engine", engine.infer)
        engine.train_batch = watch.wrap("engine", engine.train_batch)
        engine.module.forward = watch.wrap("module", engine.module.forward)
        engine.model.forward = watch.wrap("module", engine.model.forward)
        engine._backward = watch.wrap("module", engine._backward)
        engine._step = watch.wrap("module", engine._step)
    rollout = trainer.roles["rollout"].worker.rollout.engine
    rollout.generate = watch.wrap("engine", rollout.generate)


def settings(args: argparse.Namespace, folder: Path) -> list[str]:
    data = write_task("reverse", folder / "data", rows=64 * (args.steps + 2), seed=1)
    model = tiny_model("llama", folder / "model", seed=1, size=args.size)
    return [
        f"algorithm.name={args.algorithm}",
        f"data.train_files={data / 'train.parquet'}",
        "data.train_batch_size=64",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.rollout.name={args.rollout}",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        f"reward.custom_reward_function.path={SCORER}",
        f"trainer.total_training_steps={args.steps + 2}",
        f"trainer.default_local_dir={folder / 'run'}",
        "trainer.logger=[jsonl]",
    ]


def measure(args: argparse.Namespace, folder: Path) -> dict:
    trainer = LocalPPOTrainer(overrides=settings(args, folder))
    watch = Stopwatch()
    init_workers = trainer.init_workers

    def init_and_instrument() -> None:
        init_workers()
        instrument(trainer, watch)

    trainer.init_workers = init_and_instrument
    steps: list[dict] = []
    clock = [time.perf_counter()]

    def record(report: StepReport) -> None:
        now = time.perf_counter()
        steps.append(
            {
                "wall": now - clock[0],
                "engine": watch.seconds["engine"],
                "module": watch.seconds["module"],
                "timings": dict(report.timings),
                "tokens": report.metrics["perf/total_num_tokens"],
                "rows": len(report.batch),
            }
        )
        watch.seconds.clear()
        clock[0] = time.perf_counter()

    trainer.on_step.append(record)
    trainer.fit()
    steps = steps[2:]  # without the warm-up

    def median(value: Callable[[dict], float]) -> float:
        return round(statistics.median(map(value, steps)), 5)

    return {
        "benchmark": "local_step",
        "algorithm": args.algorithm,
        "rollout": args.rollout,
        "size": args.size,
        "rows": steps[0]["rows"],
        "seconds_per_step": median(lambda s: s["wall"]),
        "seconds_by_phase": {name: median(lambda s, n=name: s["timings"][n]) for name in steps[0]["timings"]},
        "tokens_per_second": round(median(lambda s: s["tokens"] / s["wall"])),
        "share_outside_model_code": median(lambda s: 1 - s["engine"] / s["wall"]),
        "share_outside_modules": median(lambda s: 1 - s["module"] / s["wall"]),
        "steps": len(steps),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": " ".join(["python", "benchmarks/local_step.py", *sys.argv[1:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--rollout", default="hf")
    parser.add_argument("--size", default="tiny", help="tiny has 103k parameters, mini 339k")
    args = parser.parse_args()
    logging.basicConfig()  # to stderr: stdout has only the JSON line
    logging.getLogger("verl").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(args, Path(folder))))


if __name__ == "__main__":
    main()
