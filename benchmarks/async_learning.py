"""Learning curves of synchronous and asynchronous training on the same task.

    python benchmarks/async_learning.py --out benchmarks/results/async_learning_cpu.json

GRPO on a task of benchmarks/learning.py, from the same model, with the same prompts and settings: synchronous on one
device, and with trainer.async.max_staleness of 1 and 2 on two, with and without algorithm.rollout_correction. `first`
and `last` are mean rewards of the first and the last ten steps; `accuracy` is greedy, on 500 held-out prompts, every 10
steps. On a CPU the devices are processes.

The runs "synchronous, delayed" are the control: one process, no thread and no buffer, but every step trains on the
batch that was generated one step before it. It shows what the age of the samples costs, without asynchronous training.
"""

import argparse
import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning import overrides, start_model
from examples.quickstart.tasks import write_task
from verl.dataflow import HOLD, DataFlow, Operator
from verl.protocol import DataProto
from verl.tracking.curves import WINDOW
from verl.trainer.asynchronous.generation import use_sampled_log_probs
from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer

SEPARATE = ["trainer.n_gpus_per_node=2", "placement.actor_devices=[0]", "placement.rollout_devices=[1]"]
CORRECTION = ["algorithm.rollout_correction.rollout_is=token"]
RUNS = {
    "synchronous": [],
    "synchronous, delayed": [],
    "synchronous, delayed, rollout_is=token": CORRECTION,
    "k=1": [*SEPARATE, "trainer.async.max_staleness=1"],
    "k=1, rollout_is=token": [*SEPARATE, "trainer.async.max_staleness=1", *CORRECTION],
    "k=2, rollout_is=token": [*SEPARATE, "trainer.async.max_staleness=2", *CORRECTION],
}
REPORTED = ("critic/score/mean", "async/staleness_mean", "async/staleness_max", "async/partial")


class Delayed(LocalPPOTrainer):
    """Synchronous training on the batch of the step before."""

    def build_flow(self) -> DataFlow:
        self.older: list[DataProto] = []
        flow = super().build_flow().insert_after("reward", Operator("delay", self._delay))
        return use_sampled_log_probs(flow, self.config)  # as in asynchronous training

    def _delay(self, batch: DataProto) -> object:
        self.older.append(batch)
        if len(self.older) == 1:
            return HOLD  # the first step generates two batches
        older = self.older.pop(0)
        older.meta_info = dict(batch.meta_info)  # of this step
        return older


def curve(settings: list[str], kind: type[LocalPPOTrainer], task: str) -> dict:
    """Train. Returns the mean reward of every step, the accuracy, and the staleness."""
    trainer, reports, accuracy = kind(overrides=[*settings, "algorithm.name=grpo"]), [], []

    def record(report: StepReport) -> None:
        reports.append({name: report.metrics.get(name, 0.0) for name in REPORTED})
        if (found := report.metrics.get(f"val-core/{task}/acc/mean@1")) is not None:
            accuracy.append((report.step, found))

    trainer.on_step.append(record)
    trainer.fit()
    rewards = [round(report["critic/score/mean"], 4) for report in reports]
    return {
        "first": round(sum(rewards[:WINDOW]) / WINDOW, 4),
        "last": round(sum(rewards[-WINDOW:]) / WINDOW, 4),
        "staleness_mean": round(sum(report["async/staleness_mean"] for report in reports) / len(reports), 3),
        "staleness_max": max(report["async/staleness_max"] for report in reports),
        "partial_samples": sum(report["async/partial"] for report in reports),
        "accuracy": accuracy,
        "reward": rewards,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="reverse")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further override")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    record = {"command": " ".join(["python", "benchmarks/async_learning.py", *sys.argv[1:]]), **versions, "runs": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = start_model(args.task, folder)
        for seed in args.seeds:
            data = write_task(args.task, folder / f"data{seed}", rows=64 * args.steps, seed=seed)
            for name in args.runs:
                settings = overrides(args.task, model, data, folder / name / str(seed), args.steps, seed=seed)
                kind = Delayed if "delayed" in name else LocalPPOTrainer
                result = curve([*settings, *RUNS[name], *args.set], kind, args.task)
                line = {"run": name, "task": args.task, "seed": seed, **result}
                record["runs"].append(line)
                print(json.dumps({key: value for key, value in line.items() if key != "reward"}), flush=True)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
