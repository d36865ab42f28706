"""Train a tiny language model with reinforcement learning, on a laptop, in about a minute.

    python examples/quickstart/run.py                      # GRPO on "reverse": abc= -> cba
    python examples/quickstart/run.py --algorithm ppo      # or rloo, remax, reinforce_plus_plus, drgrpo
    python examples/quickstart/run.py --shuffle-rewards    # control: shuffled rewards, no improvement expected
    python examples/quickstart/run.py --model smollm2      # a real model with 135M parameters: see showcase.py

The script creates a model with 103k random parameters, warms it up with SFT (about half of the sampled responses are
correct), and then trains it with RL: 64 prompts x 8 responses per step, reward 1 if correct, otherwise 0. It uses the
same trainers as real runs; only the model is small.
"""

import argparse
import logging
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import examples.quickstart  # noqa: F401  found from anywhere, installed or not

sys.path.pop(0)  # of an installed package it is the folder verl, whose modules would hide others

from verl.utils.log import announce_loading, setup_logging

if not {"-h", "--help"} & {*sys.argv}:
    announce_loading()

import torch
from rich.console import Console

from examples.quickstart.alive import Alive
from examples.quickstart.tasks import ALIVE_SECONDS, SEED, STEPS, TASKS, check_output_folder, next_steps, write_task
from examples.quickstart.tiny_model import tiny_model
from verl.config import check_inputs, load_config
from verl.config.checks.run import check_built_in
from verl.config.load import check_combinations, read_config
from verl.tracking.console import TrainingProgress
from verl.tracking.curves import read_metrics, save_curves
from verl.trainer.base import StepReport
from verl.trainer.guards.interruption import Stopped
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.output.samples import generations
from verl.trainer.sft_trainer import SFTTrainer
from verl.trainer.startup.command_line import user_errors

ALGORITHMS = ("grpo", "ppo", "rloo", "remax", "reinforce_plus_plus", "drgrpo")
SCORER = str(Path(__file__).resolve().parent / "tasks.py")
#: SFT steps after which the model is partly correct
WARM_UP_STEPS = {"reverse": 200, "sort": 80, "countdown3": 600, "digit": 90}
MODEL_SIZE = {"reverse": "tiny", "sort": "tiny", "countdown3": "mini", "digit": "tiny"}
CRITIC = ["critic.model.enable_gradient_checkpointing=false", "critic.optim.lr=1e-3"]
SAMPLES_EVERY = 10
#: of the settings, before the warm-up
CHECKS = (check_combinations, check_inputs, check_built_in)
#: files of a run, which the next run in the folder replaces
WRITTEN = {"model", "data", "sft", "rl", "curves.png"}


def warm_up(model: Path, data: Path, out: Path, steps: int, seed: int, say: Callable[[str], object] = print) -> Path:
    """SFT warm-up for `steps` steps of 64 examples. Returns the model folder. say: receives lines if it takes long."""
    trainer = SFTTrainer(
        overrides=[
            f"model.path={model}",
            "model.enable_gradient_checkpointing=false",
            f"data.train_files={data / 'sft.parquet'}",
            "data.train_batch_size=64",
            "data.max_length=32",
            "optim.lr=1e-3",
            "optim.lr_warmup_steps=20",
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={steps}",
            f"trainer.seed={seed}",
            f"trainer.default_local_dir={out}",
            "trainer.logger=[jsonl]",
        ]
    )
    with Alive(say, lambda: f"SFT warm-up, step {trainer.global_step} of {steps}", ALIVE_SECONDS):
        trainer.fit()
    return trainer.checkpoints.latest() / "actor" / "huggingface"


def rl_overrides(args: argparse.Namespace, model: Path, data: Path, out: Path) -> list[str]:
    """Overrides of the run, as on the command line."""
    return [
        f"algorithm.name={args.algorithm}",
        "algorithm.use_kl_in_reward=false",
        f"algorithm.shuffle_rewards={str(args.shuffle_rewards).lower()}",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        "data.train_batch_size=64",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.ref.enable=true",  # only for the KL metric
        *(CRITIC if args.algorithm == "ppo" else []),
        f"reward.custom_reward_function.path={SCORER}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.test_freq={args.steps}",
        f"trainer.save_freq={args.steps}",
        f"trainer.seed={args.seed}",
        f"trainer.default_local_dir={out}",
        "trainer.logger=[jsonl]",
        "trainer.resume_mode=disable",
        *args.override,
    ]


def learn(args: argparse.Namespace, model: Path, data: Path, out: Path) -> tuple[list[float], dict[str, float]]:
    """Train with RL. Returns the mean reward of every step, and the last metrics."""
    with user_errors():
        trainer = LocalPPOTrainer(overrides=rl_overrides(args, model, data, out))
    rewards: list[float] = []
    random = Random(args.seed)
    title = f"{name_of(args)} on {args.task}: 64 prompts x 8 responses per step"
    with (
        TrainingProgress(trainer.total_steps, title, running=trainer.view.running_operators) as progress,
        Alive(progress.console.print, progress.activity, None if progress.is_live else ALIVE_SECONDS) as alive,
    ):

        def show(report: StepReport) -> None:
            samples = None
            if report.step % SAMPLES_EVERY == 1 or report.step == report.total_steps:
                rows = generations(report.batch[random.sample(range(len(report.batch)), 4)], trainer.tokenizer)
                samples = [(row["input"], row["output"], row["score"]) for row in rows]
            rewards.append(report.metrics["critic/score/mean"])
            progress.update(report.step, report.metrics, report.timings, samples)
            alive.reset()

        trainer.on_step.append(show)
        metrics = trainer.fit()
    return rewards, metrics


def name_of(args: argparse.Namespace) -> str:
    return f"{args.algorithm} with shuffled rewards" if args.shuffle_rewards else args.algorithm


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="train this model: smollm2, or a folder; its other options: --model smollm2 -h")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    parser.add_argument("--task", choices=sorted(TASKS), default="reverse")
    parser.add_argument("--steps", type=STEPS, default=100, help="RL steps (default 100)")
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument(
        "--out", type=Path, default=None, help="default: outputs/quickstart/<task>-<algorithm>[-shuffled]"
    )
    parser.add_argument(
        "--shuffle-rewards", action="store_true", help="control: shuffle the rewards, so the policy should not improve"
    )
    parser.add_argument("override", nargs="*", metavar="key=value", help="any config key")
    args = parser.parse_args(argv)
    if args.out is None:
        kind = "-shuffled" if args.shuffle_rewards else ""
        args.out = Path("outputs/quickstart") / f"{args.task}-{args.algorithm}{kind}"
    check_output_folder(parser, args.out, WRITTEN)
    return args


def main(argv: list[str] | None = None) -> int:
    """Create a model, warm it up, train it, and print the result. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if any(word.split("=")[0] == "--model" for word in argv):
            from examples.quickstart import showcase

            return showcase.main(argv)
        return quickstart(arguments(argv))
    except Stopped as stop:
        print(f"\nstopped by {stop.signal.name}; the same command starts again from the beginning", file=sys.stderr)
        return stop.exit_status


def quickstart(args: argparse.Namespace) -> int:
    """Train the random model."""
    setup_logging()
    logging.getLogger("verl").setLevel(logging.WARNING)
    console = Console()
    start = time.perf_counter()
    torch.set_num_threads(1)  # matrices this small do not benefit from more threads
    steps = WARM_UP_STEPS[args.task]
    with user_errors():
        shutil.rmtree(args.out, ignore_errors=True)
        model = tiny_model("llama", args.out / "model", seed=args.seed, size=MODEL_SIZE[args.task])
        data = write_task(args.task, args.out / "data", rows=64 * args.steps, sft_rows=64 * steps, seed=args.seed)
        read_config(None, rl_overrides(args, model, data, args.out / "rl"), checks=CHECKS)
    console.print(f"random model and {64 * args.steps:,} prompts created; SFT warm-up, {steps} steps ...")
    warm = warm_up(model, data, args.out / "sft", steps, args.seed, console.print)
    console.print(f"SFT warm-up done after {time.perf_counter() - start:.0f} s; RL training, {args.steps} steps\n")
    if args.shuffle_rewards:
        console.print("rewards are shuffled, so the policy should not improve\n")
    rewards, metrics = learn(args, warm, data, args.out / "rl")
    window = max(1, min(10, len(rewards) // 2))
    first, last = (sum(chunk) / window for chunk in (rewards[:window], rewards[-window:]))
    curves = save_curves(args.out / "rl" / "metrics.jsonl", args.out / "curves.png")
    accuracy = f"val-core/{args.task}/acc/mean@1"
    ((_, before), *_) = read_metrics(args.out / "rl" / "metrics.jsonl")[accuracy]  # validation before training
    steps = len(rewards)  # fewer than args.steps if a guard stopped the run
    saved = args.out / "rl" / f"global_step_{steps}" / "actor" / "huggingface"
    console.print(
        f"\n[bold]mean reward {first:.2f} -> {last:.2f} in {steps} steps[/bold] of {name_of(args)} "
        f"(first and last {window} steps)\n"
        f"accuracy {before:.2f} -> {metrics[accuracy]:.2f} on 500 held-out prompts, greedy; "
        f"{time.perf_counter() - start:.0f} s total",
        highlight=False,
        soft_wrap=True,
    )
    config = load_config(None, rl_overrides(args, args.out / "model", data, args.out / "rl"))
    ends = [f"curves: {curves}", f"model:  {saved}  (HuggingFace format)", *next_steps(config, saved, args.out / "rl")]
    console.print("\n".join(ends), highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
