"""Runs of the recipes of SmolLM2-135M-Instruct, several at a time on each GPU, and their records.

    python benchmarks/smollm2_recipes.py --model FOLDER --gsm8k FOLDER --out OUT --gpus 2 --minutes 9
    python benchmarks/smollm2_recipes.py --model FOLDER --gsm8k FOLDER --out OUT --tiny     # a step of each, on a CPU

Every job is `examples/recipes/NAME/run.sh` in its own process group, with a time limit. OUT/NAME.json has the
runs of a recipe in the form of its results/record.json; OUT/NAME/... the logs. A job that failed or was cut off is
named in the table that is printed last; one that does not fit into the rest of the time is not started.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "tensordict", "peft", "bitsandbytes")
SEEDS = (1, 2, 3)
ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
LORA = (f"{MODEL}lora_rank=16", f"{MODEL}lora_alpha=32", f"{ACTOR}optim.lr=2e-4")
#: without the teacher of a distillation
GRPO = ("distillation.enabled=false", f"{ACTOR}optim.lr=2e-5", "trainer.total_training_steps=100")
#: of a process that shares its GPU
SHARED = "{}ppo_max_token_len_per_gpu={} actor_rollout_ref.rollout.gpu_memory_utilization={}"
TINY = ("data.train_batch_size=2", f"{ACTOR}ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2")
TINY += ("data.val_max_samples=4", "trainer.total_training_steps=6", "data.max_response_length=16")
CURVES = {"rewards": "critic/score/mean", "nll": "train/nll", "pair_accuracy": "rewards/accuracies"}
CURVES |= {"tool_calls": "rollout/tool_calls", "response_length": "response_length/mean"}


@dataclass(frozen=True)
class Job:
    """A run. seconds: expected; share: of the places of a GPU; variant: what differs from the recipe."""

    recipe: str
    seed: int
    settings: tuple[str, ...] = ()
    variant: str = ""
    seconds: int = 130
    share: int = 1
    env: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.recipe, self.variant.replace(" ", "_"), str(self.seed))))


def _gsm8k(variant: str, seed: int, sft: str = "", *settings: str) -> Job:
    return Job("smollm2_gsm8k", seed, settings, variant, 300, 2, {"SFT": sft} if sft else {})


def jobs() -> list[Job]:
    """All, in the order in which they start: long ones, then those of the first seed."""
    long = [
        _gsm8k("", 1),
        _gsm8k("SFT with lr 1e-4", 1, "optim.lr=1e-4"),
        _gsm8k("no SFT", 1, "none"),
        _gsm8k("SFT of 4 epochs", 1, "trainer.total_epochs=4"),
        _gsm8k("GRPO with lr 3e-5, 16 samples", 1, "", f"{ACTOR}optim.lr=3e-5", "actor_rollout_ref.rollout.n=16"),
        _gsm8k("", 2),
        _gsm8k("", 3),
    ]
    rest = []
    for seed in SEEDS:
        rest += [
            Job("smollm2_calculator", seed, seconds=150),
            Job("smollm2_distill", seed, seconds=150),
            Job("smollm2_dpo", seed, seconds=150),
            Job("smollm2_format", seed, seconds=150),
            Job("smollm2_search", seed, seconds=150),
            Job("smollm2_distill", seed, GRPO, "control: GRPO", 150),
            Job("smollm2_countdown", seed),
            Job("smollm2_sft", seed, seconds=100),
            *(Job("smollm2_lora", seed, *rest) for rest in (((), "all weights"), (LORA, "LoRA"))),
            Job("smollm2_lora", seed, (*LORA, f"{MODEL}quantization=nf4"), "QLoRA"),
        ]
    rest += [
        Job("smollm2_dpo", 1, ("dpo.loss=orpo",), "ORPO", 150),
        Job("smollm2_dpo", 1, ("optim.lr=1e-6",), "lr 1e-6", 150),
        Job("smollm2_countdown", 1, (f"{ACTOR}optim.lr=5e-6", "actor_rollout_ref.rollout.n=16"), "lr 5e-6, 16 samples"),
    ]
    return long[:5] + rest[:11] + long[5:] + rest[11:]


class Run:
    """A job that was started: its process group, and what it wrote."""

    def __init__(self, job: Job, args: argparse.Namespace, gpu: int | None):
        self.job, self.gpu, self.start = job, gpu, time.monotonic()
        self.folder = args.out / job.recipe / (job.name.removeprefix(job.recipe).strip("-"))
        self.folder.mkdir(parents=True)
        env = os.environ | {"MODEL": str(args.model), "OUT": str(self.folder / "out"), "SEED": str(job.seed)}
        env |= {
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "GSM8K": str(args.gsm8k),
            "HF_HUB_OFFLINE": "1",
        }
        env |= {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", **job.env}
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(gpu)
        if args.tiny:
            env["ALL"] = "trainer.total_training_steps=6 data.train_batch_size=2 data.train_max_samples=64"
            env["RL"] = " ".join(TINY)
        elif gpu is not None:
            env["RL"] = SHARED.format(ACTOR, *((4096, 0.04) if job.share == 1 else (8192, 0.12)))
            env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        command = ["bash", str(ROOT / f"examples/recipes/{job.recipe}/run.sh"), *job.settings]
        self.command = " ".join(["bash", f"examples/recipes/{job.recipe}/run.sh", *job.settings])
        with (self.folder / "log.txt").open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=ROOT, start_new_session=True)
        self.seconds = 0.0

    def ended(self) -> bool:
        self.seconds = time.monotonic() - self.start
        return self.process.poll() is not None

    def stop(self) -> None:
        """End the process group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(3)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def record(self) -> dict[str, Any]:
        """What record.json has of a run: accuracies of the validations by stage, and the curves of the steps."""
        tests: dict[str, list] = {}
        curves: dict[str, list[float]] = {}
        for log in sorted(self.folder.glob("out/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime):
            for line in log.read_text(encoding="utf-8").splitlines():
                metrics = json.loads(line)
                for name, metric in CURVES.items():
                    if metric in metrics:
                        stage = name if log.parent.name in ("grpo", "dpo") else f"{log.parent.name}_{name}"
                        curves.setdefault(stage, []).append(round(metrics[metric], 4))
                values = [v for k, v in metrics.items() if k.startswith("val-core/") and k.endswith("/mean@1")]
                if values:
                    tests.setdefault(log.parent.name, []).append([metrics["step"], round(values[0], 4)])
        accuracies = [value for stage in tests.values() for _, value in stage]
        job, code = self.job, self.process.poll()
        return {
            **({"variant": job.variant} if job.variant else {}),
            "seed": job.seed,
            "before": accuracies[0] if accuracies else None,
            "after": accuracies[-1] if len(accuracies) > 1 else None,
            "seconds": round(self.seconds),
            "exit": code,
            "settings": [*job.settings, *(f"{key}={value}" for key, value in job.env.items())],
            "tests": tests,
            **curves,
        }


def device() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        return f"CPU, {os.cpu_count()} cores"
    return f"{len(names) - 1} x {names[0]}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write(runs: list[Run], args: argparse.Namespace) -> None:
    """OUT/NAME.json of every recipe."""
    about = {"hardware": device(), "shared_by": args.places, "python": platform.python_version()}
    versions = {package: _version(package) for package in PACKAGES}
    for recipe in {run.job.recipe for run in runs}:
        of = [run for run in runs if run.job.recipe == recipe]
        of.sort(key=lambda run: (run.job.variant, run.job.seed))
        content = {"command": f"SEED=1 bash examples/recipes/{recipe}/run.sh", **about, "versions": versions}
        text = json.dumps(content | {"runs": [run.record() for run in of]}).replace('{"variant"', '\n{"variant"')
        (args.out / f"{recipe}.json").write_text(text.replace('{"seed"', '\n{"seed"') + "\n", encoding="utf-8")


def row(run: Run) -> str:
    found = run.record()
    rewards = found.get("rewards") or found.get("pair_accuracy") or found.get("sft_nll") or [0.0]
    state = {0: "", None: "cut off"}.get(found["exit"], f"exit {found['exit']}")
    curve = f"{rewards[0]:.3f} -> {rewards[-1]:.3f} in {len(rewards)} steps"
    tests = " ".join(f"{stage} {[value for _, value in values]}" for stage, values in found["tests"].items())
    return f"{run.job.name:48} {found['seconds']:4} s  GPU {run.gpu}  {curve:34} {tests} {state}"


def schedule(waiting: list[Job], args: argparse.Namespace) -> list[Run]:
    """Start the jobs, as many at a time as there are places, until all have ended or the time is over."""
    gpus: list[int | None] = list(range(args.gpus)) or [None]
    end = time.monotonic() + 60 * args.minutes
    runs: list[Run] = []
    running: list[Run] = []
    while (waiting or running) and time.monotonic() < end:
        for run in [run for run in running if run.ended()]:
            running.remove(run)
            print(f"{60 * args.minutes - end + time.monotonic():4.0f} s  {row(run)}", flush=True)
            write(runs, args)
        taken = {gpu: sum(run.job.share for run in running if run.gpu == gpu) for gpu in gpus}
        gpu = min(gpus, key=lambda gpu: taken[gpu])
        left = end - time.monotonic()
        chosen = next(
            (job for job in waiting if taken[gpu] + min(job.share, args.places) <= args.places and job.seconds < left),
            None,
        )
        if chosen is None:
            time.sleep(0.5)
            if not running:
                break
            continue
        waiting.remove(chosen)
        runs.append(Run(chosen, args, gpu))
        running.append(runs[-1])
        time.sleep(0.3)
    for run in running:
        run.ended()
        run.stop()
    write(runs, args)
    return runs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--parts", type=Path, help="folder of the parts of its GGUF file, from which MODEL is made")
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--places", type=int, default=6, help="processes per GPU")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="jobs whose name has one of these")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--tiny", action="store_true", help="one step of each, to see that it runs")
    args = parser.parse_args()
    args.model, args.out, args.gsm8k = (path.resolve() for path in (args.model, args.out, args.gsm8k))
    return args


def main() -> None:
    args = arguments()
    sys.path.insert(0, str(ROOT))
    if args.parts and not (args.model / "config.json").is_file():
        from examples.quickstart.smollm2 import GGUF, convert

        source = args.out / "gguf"
        source.mkdir(parents=True)
        with (source / GGUF).open("wb") as whole:
            for part in sorted(args.parts.rglob("part*")):
                whole.write(part.read_bytes())
        convert(source, args.model)
        (source / GGUF).unlink()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [job for job in jobs() if job.seed in args.seeds]
    wanted = [job for job in wanted if not args.only or any(text in f"{job.name}-" for text in args.only)]
    runs = schedule([*wanted], args)
    started = {run.job for run in runs}
    for run in (run for run in runs if run.process.poll() != 0):
        text = (run.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        print(f"---- {run.job.name}: {run.command}\n" + "\n".join(text.splitlines()[-12:]))
    print("\n".join(row(run) for run in sorted(runs, key=lambda run: run.job.name)))
    for job in wanted:
        if job not in started:
            print(f"{job.name:48} not started")


if __name__ == "__main__":
    main()
