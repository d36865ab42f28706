"""The GSM8K baseline: SFT on the training solutions, then GRPO, on one GPU, within a budget of wall time.

    python benchmarks/baseline_gsm8k.py --model MODEL --data DATA --out OUT [--json FILE]

MODEL: a small chat model, such as SmolLM2-135M-Instruct: a folder or a Hub id. DATA: a folder with train.jsonl and
test.jsonl (question, answer), as in openai/gsm8k, or with train.parquet and test.parquet as examples/data_preprocess
writes them. OUT: a new folder. Greedy accuracy on the test questions is measured before SFT, after SFT, and every
`--test-every` steps of GRPO; the last step of GRPO is the one that begins after `--grpo-seconds`. Two minutes on a CPU:

    python benchmarks/baseline_gsm8k.py --model data/tiny --data DATA --out OUT --sft-steps 2 --grpo-seconds 5 \\
        --test-rows 4 --train-rows 64 --prompts 2 --samples 2 --response 16

Writes the result to FILE (default: OUT/baseline_gsm8k.json) after every stage: accuracies with the number of
questions, curves, seconds and GPU hours per stage, seeds, versions and the command.
"""

import argparse
import json
import logging
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from examples.data_preprocess.gsm8k import local_rows
from verl.checkpoints.atomic import atomic_write
from verl.data.files import read_rows
from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.sft_trainer import SFTTrainer

PACKAGES = ("torch", "transformers", "tensordict", "triton")
#: metrics of a step that the result keeps
CURVE = (
    "critic/score/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "actor/grad_norm",
    "rollout/logprob_gap_mean",
    "reward/tied_groups",
    "perf/throughput",
)
POLICY = "actor_rollout_ref."


class Result:
    """The JSON file of the run, written again after every change."""

    def __init__(self, args: argparse.Namespace, path: Path):
        self.path = path
        cuda = torch.cuda.is_available()
        versions = {name: _version(name) for name in PACKAGES}
        self.values: dict[str, Any] = {
            "benchmark": "baseline_gsm8k",
            "command": " ".join(["python", "benchmarks/baseline_gsm8k.py", *sys.argv[1:]]),
            "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
            "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
            "versions": {"python": platform.python_version(), **versions},
            "accuracy": {},
            "stages": {},
        }
        self.start = time.perf_counter()

    def stage(self, name: str, seconds: float, **values: Any) -> None:
        """Record a finished stage."""
        self.values["stages"][name] = {"seconds": round(seconds, 1), **values}
        self.write()

    def write(self) -> None:
        seconds = time.perf_counter() - self.start
        self.values["seconds"] = round(seconds, 1)
        self.values["gpu_hours"] = round(seconds / 3600, 4) if torch.cuda.is_available() else 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as draft:
            draft.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_data(args: argparse.Namespace) -> Path:
    """Write train.jsonl and test.jsonl for GRPO, and sft.jsonl with the solutions. Returns their folder."""
    folder = args.out / "data"
    folder.mkdir(parents=True)
    for split, limit in {"train": args.train_rows, "test": args.test_rows}.items():
        parquet = args.data / f"{split}.parquet"
        rows = read_rows(parquet) if parquet.exists() else local_rows(args.data, split)
        rows = [rows[index] for index in range(len(rows))][:limit]
        _write_jsonl(folder / f"{split}.jsonl", rows)
        if split == "train":
            chats = [[*row["prompt"], _answer(row["extra_info"]["answer"])] for row in rows]
            _write_jsonl(folder / "sft.jsonl", [{"messages": chat} for chat in chats])
    return folder


def _answer(solution: str) -> dict[str, str]:
    return {"role": "assistant", "content": solution}


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rl_settings(args: argparse.Namespace, model: Path | str, data: Path, out: Path) -> list[str]:
    """Settings of GRPO and of every validation."""
    return [
        "algorithm.name=grpo",
        f"data.train_files={data / 'train.jsonl'}",
        f"data.val_files={data / 'test.jsonl'}",
        f"data.train_batch_size={args.prompts}",
        "data.max_prompt_length=512",
        "data.filter_overlong_prompts=true",
        f"data.max_response_length={args.response}",
        f"{POLICY}model.path={model}",
        f"{POLICY}model.enable_gradient_checkpointing=false",
        f"{POLICY}rollout.name=native",
        f"{POLICY}rollout.n={args.samples}",
        f"{POLICY}rollout.val_kwargs.do_sample=false",
        f"{POLICY}actor.ppo_mini_batch_size={args.prompts}",
        f"{POLICY}actor.optim.lr={args.grpo_lr}",
        f"{POLICY}actor.optim.lr_warmup_steps=5",
        f"{POLICY}actor.use_kl_loss=false",
        "trainer.total_training_steps=10000",  # the budget of time ends the run
        f"trainer.test_freq={args.test_every}",
        "trainer.save_at_end=false",
        "trainer.resume_mode=disable",
        f"trainer.seed={args.seed}",
        f"trainer.default_local_dir={out}",
        "trainer.logger=[jsonl]",
    ]


def accuracy_of(metrics: dict[str, float]) -> float | None:
    """The greedy accuracy among the metrics of a validation; None if there was none."""
    accuracies = [value for name, value in metrics.items() if name.startswith("val-core/") and "/acc/" in name]
    return round(accuracies[0], 4) if accuracies else None


def before_sft(args: argparse.Namespace, result: Result, data: Path) -> None:
    start = time.perf_counter()
    settings = rl_settings(args, args.model, data, args.out / "before")
    metrics = LocalPPOTrainer(overrides=[*settings, "trainer.val_only=true"]).fit()
    result.values["accuracy"]["before"] = accuracy_of(metrics)
    result.stage("before", time.perf_counter() - start)


def sft(args: argparse.Namespace, result: Result, data: Path) -> Path:
    """Train on the solutions. Returns the folder of the model."""
    start = time.perf_counter()
    rows = sum(1 for _ in (data / "sft.jsonl").open(encoding="utf-8"))
    batch = min(args.sft_batch, rows)
    steps = args.sft_steps or args.sft_epochs * (rows // batch)
    trainer = SFTTrainer(
        overrides=[
            f"model.path={args.model}",
            "model.enable_gradient_checkpointing=false",
            f"data.train_files={data / 'sft.jsonl'}",
            f"data.train_batch_size={batch}",
            "data.max_token_len_per_gpu=16384",
            "data.max_length=1024",
            "data.truncation=right",
            f"optim.lr={args.sft_lr}",
            "optim.lr_warmup_steps_ratio=0.05",
            "optim.lr_scheduler_type=cosine",
            f"trainer.total_epochs={args.sft_epochs}",
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={steps}",
            f"trainer.seed={args.seed}",
            f"trainer.default_local_dir={args.out / 'sft'}",
            "trainer.logger=[jsonl]",
        ]
    )
    nll: list[float] = []
    trainer.on_step.append(lambda report: nll.append(round(report.metrics["train/nll"], 4)))
    trainer.fit()
    result.stage("sft", time.perf_counter() - start, steps=steps, examples=rows, nll=nll[:: max(1, steps // 40)])
    return trainer.checkpoints.latest() / "actor" / "huggingface"


def grpo(args: argparse.Namespace, result: Result, model: Path, data: Path) -> None:
    """Train with GRPO until the budget of time is used."""
    start = time.perf_counter()
    trainer = LocalPPOTrainer(overrides=rl_settings(args, model, data, args.out / "grpo"))
    curve: list[dict[str, Any]] = []
    tests: list[dict[str, Any]] = []
    validate = trainer.validate

    def test() -> dict[str, float]:
        found = validate()
        seconds = round(time.perf_counter() - start, 1)
        tests.append({"step": trainer.global_step, "seconds": seconds, "accuracy": accuracy_of(found)})
        result.values["accuracy"]["sft" if trainer.global_step == 0 else "grpo"] = tests[-1]["accuracy"]
        result.stage("grpo", seconds, steps=trainer.global_step, tests=tests, curve=curve)
        print(f"step {trainer.global_step}: {tests[-1]}", flush=True)
        return found

    def note(report: StepReport) -> None:
        seconds = time.perf_counter() - start
        metrics = {name: round(report.metrics[name], 6) for name in CURVE if name in report.metrics}
        timings = {name: round(value, 2) for name, value in report.timings.items() if value >= 0.01}
        curve.append({"step": report.step, "seconds": round(seconds, 1), **metrics, "timings": timings})
        if report.step % 5 == 1:
            print(json.dumps(curve[-1]), flush=True)
        if seconds >= args.grpo_seconds and trainer.global_step < trainer.total_steps:
            trainer.total_steps = trainer.global_step + 1  # the last step, which is followed by a validation

    trainer.validate = test
    trainer.on_step.append(note)
    trainer.fit()
    result.stage("grpo", time.perf_counter() - start, steps=trainer.global_step, tests=tests, curve=curve)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="default: OUT/baseline_gsm8k.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train-rows", type=int, default=None, help="default: all")
    parser.add_argument("--test-rows", type=int, default=None, help="default: all")
    parser.add_argument("--sft-epochs", type=int, default=3)
    parser.add_argument("--sft-steps", type=int, default=None, help="default: that of the epochs")
    parser.add_argument("--sft-batch", type=int, default=64)
    parser.add_argument("--sft-lr", type=float, default=1e-4)
    parser.add_argument("--grpo-seconds", type=float, default=300, help="start-up and validations included")
    parser.add_argument("--grpo-lr", type=float, default=1e-5)
    parser.add_argument("--prompts", type=int, default=64, help="per step")
    parser.add_argument("--samples", type=int, default=16, help="responses per prompt")
    parser.add_argument("--response", type=int, default=320, help="maximum response length in tokens")
    parser.add_argument("--test-every", type=int, default=20, help="steps between validations")
    args = parser.parse_args()
    args.data, args.out = args.data.expanduser(), args.out.expanduser()
    if args.out.exists():
        parser.error(f"--out: expected a new folder, found {args.out}")
    return args


def main() -> None:
    args = arguments()
    logging.basicConfig()
    logging.getLogger("verl").setLevel(logging.WARNING)
    result = Result(args, args.json or args.out / "baseline_gsm8k.json")
    data = write_data(args)
    test_rows = sum(1 for _ in (data / "test.jsonl").open(encoding="utf-8"))
    result.values["accuracy"]["questions"] = test_rows
    before_sft(args, result, data)
    print(f"greedy accuracy before SFT {result.values['accuracy']['before']}", flush=True)
    model = sft(args, result, data)
    print(f"SFT: {result.values['stages']['sft']['seconds']} s", flush=True)
    grpo(args, result, model, data)
    print(json.dumps({name: result.values[name] for name in ("accuracy", "seconds", "gpu_hours")}))


if __name__ == "__main__":
    main()
