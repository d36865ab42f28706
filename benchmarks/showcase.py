"""The showcase beside TRL's GRPOTrainer: the same model, questions, reward, batch and steps, on the same two CPU cores.

    python benchmarks/showcase.py MODEL --trl-python PYTHON [--steps 12] [--out benchmarks/results/showcase_cpu.json]

MODEL: the folder of SmolLM2-135M-Instruct. PYTHON: an environment with trl. Each trainer runs in a separate process,
and they alternate step by step, so that both see the same load of the machine. Responses end after the same number of
tokens or with the end token; stop strings are off. One JSON line per trainer, and one that compares them: `faster` is
the median ratio of paired steps, by wall clock and by CPU time. The exit status is 1 if a trainer fails.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.grpo_step import Child, Reporter, compared, versions
from examples.quickstart import arithmetic

PROMPTS, SAMPLES, LEARNING_RATE = 16, 8, 2e-5


def run_ours(args: argparse.Namespace, reporter: Reporter) -> None:
    from examples.quickstart.showcase import settings
    from verl.trainer.local_trainer import LocalPPOTrainer

    overrides = settings(args.model, args.folder, args.folder / "run", args.steps, seed=1)
    quiet = ["actor_rollout_ref.rollout.stop=[]", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    trainer = LocalPPOTrainer(overrides=[*overrides, *quiet])
    init_workers = trainer.init_workers

    def ready() -> None:
        init_workers()
        reporter.go()

    trainer.init_workers = ready
    trainer.on_step.append(
        lambda report: reporter.step_done(
            reward=report.metrics["critic/score/mean"],
            new_tokens=report.metrics["response_length/mean"],
            **{f"{name}_seconds": seconds for name, seconds in report.timings.items() if seconds > 0.01},
        )
    )
    trainer.fit()


def run_trl(args: argparse.Namespace, reporter: Reporter) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Report(TrainerCallback):
        """A step ends when its metrics are logged, after the update."""

        def on_train_begin(self, *_, **__) -> None:
            reporter.go()

        def on_log(self, _, state, __, logs: dict, **___) -> None:
            if "reward" in logs:
                reporter.step_done(reward=logs["reward"], new_tokens=logs["completions/mean_length"])

    def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [arithmetic.compute_score("", text, truth)["score"] for text, truth in zip(completions, answer)]

    rows = [json.loads(line) for line in (args.folder / "train.jsonl").open(encoding="utf-8")]
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=str(args.folder / "trl"),
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=arithmetic.RESPONSE_TOKENS,
            max_steps=args.steps,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            warmup_steps=3,
            lr_scheduler_type="cosine",
            weight_decay=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows]
        ),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[Report()],
    )
    trainer.train()


TRAINERS = {"ours": run_ours, "trl": run_trl}


def run_child(args: argparse.Namespace) -> None:
    reporter = Reporter()
    import torch

    torch.set_num_threads(args.threads)
    TRAINERS[args.child](args, reporter)


def line_of(child: Child, steps: list[dict], first: dict) -> dict[str, Any]:
    """What was measured of one trainer. first: its first step, which includes one-time work."""
    keys = [key for key, value in steps[-1].items() if isinstance(value, float) and key != "reward"]
    return {
        "benchmark": "showcase",
        "trainer": child.name,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "steps": len(steps),
        "start_to_end_of_first_step_seconds": round(child.first, 2),
        "first_step_seconds": round(first["seconds"], 2),
        **{key: round(statistics.median(step[key] for step in steps if key in step), 4) for key in keys},
        "rewards": [round(step["reward"], 4) for step in (first, *steps)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter with trl")
    parser.add_argument("--against", default="trl", help="trl, or an empty string for this library only")
    parser.add_argument("--steps", type=int, default=12, help="per trainer; the first one is not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1200, help="time limit of one process in seconds")
    parser.add_argument("--out", type=Path, help="also write the record to this file")
    parser.add_argument("--child", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--betas", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps={args.steps}: expected at least 2, since the first one is not counted")
    if args.child:
        run_child(args)
        return
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""}
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    args.of_child = [args.model, f"--steps={args.steps}", f"--threads={args.threads}"]
    with tempfile.TemporaryDirectory() as folder:
        arithmetic.write_arithmetic(folder, PROMPTS * args.steps)
        children = [Child(name, Path(folder), [0.0], args, __file__) for name in ("ours", args.against) if name]
        for _ in range(args.steps):
            if not all([child.step() for child in children]):
                break
        failures = [failure for child in children for failure in child.end(args.steps)]
    lines = [line_of(child, child.steps[1:], child.steps[0]) for child in children if len(child.steps) > 1]
    if len(lines) == 2:
        lines.append(compared(args.against, children[0].steps[1:], children[1].steps[1:], 0.0))
    for line in lines:
        print(json.dumps(line))
    if args.out:
        command = [word if word != args.trl_python else "PYTHON" for word in sys.argv[2:]]
        record = {
            "device": f"cpu, {args.threads} threads",
            "versions": {name: versions(sys.executable if name == "ours" else args.trl_python) for name in TRAINERS},
            "command": " ".join(["python benchmarks/showcase.py MODEL", *command]),
            "results": lines,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
