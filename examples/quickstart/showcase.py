"""Train a pretrained language model on arithmetic with GRPO on two CPU cores, and show its responses during training.

    python examples/quickstart/run.py --model smollm2                 # SmolLM2-135M-Instruct, see smollm2.py
    python examples/quickstart/run.py --model FOLDER                  # a HuggingFace chat model

Sums of two-digit numbers (arithmetic.py): 16 prompts x 8 responses per step, all weights trained in
float32. Greedy accuracy on questions that are not in the training set is measured before and after.
"""

import argparse
import functools
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from examples.quickstart import arithmetic
from examples.quickstart.alive import Alive
from examples.quickstart.smollm2 import find_model
from examples.quickstart.tasks import ALIVE_SECONDS, SEED, STEPS, check_output_folder, next_steps
from verl.tracking.console import TrainingProgress
from verl.tracking.curves import save_curves
from verl.trainer.base import StepReport
from verl.trainer.guards.interruption import Stopped
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.output.samples import generations
from verl.trainer.startup.command_line import user_errors, whole_number
from verl.utils.log import setup_logging

SCORER = str(Path(__file__).resolve().parent / "arithmetic.py")
PROMPTS, SAMPLES = 16, 8
SAMPLES_EVERY = 5
#: questions whose responses before and after training are printed
SHOWN = 6
#: files of a run, which the next run in the folder replaces
WRITTEN = {"data", "rl", "curves.png"}


def settings(model: Path | str, data: Path, out: Path, steps: int, seed: int) -> list[str]:
    """Overrides of the run, as on the command line."""
    policy = "actor_rollout_ref."
    return [
        "algorithm.name=grpo",
        f"data.train_files={data / 'train.jsonl'}",
        f"data.val_files={data / 'test.jsonl'}",
        f"data.train_batch_size={PROMPTS}",
        f"data.prompt_format={arithmetic.PROMPT_FORMAT}",
        "data.max_prompt_length=64",
        f"data.max_response_length={arithmetic.RESPONSE_TOKENS}",
        f"{policy}model.path={model}",
        f"{policy}model.enable_gradient_checkpointing=false",
        f"{policy}rollout.n={SAMPLES}",
        f'{policy}rollout.stop=["\\n"]',
        f"{policy}rollout.val_kwargs.do_sample=false",
        f"{policy}actor.ppo_mini_batch_size={PROMPTS}",  # one update per step: no pass for old log-probs
        f"{policy}actor.optim.lr=2e-5",
        f"{policy}actor.optim.lr_warmup_steps={min(3, steps - 1)}",
        f"{policy}actor.optim.lr_scheduler_type=cosine",
        f"{policy}actor.optim.weight_decay=0",
        f"{policy}actor.use_kl_loss=false",
        f"reward.custom_reward_function.path={SCORER}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        f"{policy}actor.checkpoint.save_contents=[hf_model]",
        f"trainer.log_val_generations={SHOWN}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={out}",
        "trainer.logger=[jsonl]",
        "trainer.resume_mode=disable",
    ]


class Showcase:
    """A run of the showcase.

    Attributes:
        accuracies: greedy accuracy on the test questions, before and after, and at every validation between.
        answers: test questions with their responses, at the same steps.
        rewards: mean reward of every step.
    """

    def __init__(self, overrides: Sequence[str], seed: int):
        self.trainer = LocalPPOTrainer(overrides=list(overrides))
        self.accuracies: list[float] = []
        self.answers: list[list[dict[str, Any]]] = []
        self.rewards: list[float] = []
        self._random = Random(seed)
        self._validate = self.trainer.validate
        self.trainer.validate = self.validate

    def validate(self) -> dict[str, float]:
        metrics = self._validate()
        self.accuracies.append(metrics["val-core/arithmetic/acc/mean@1"])
        self.answers.append(list(self.trainer.validation_samples()))
        return metrics

    def run(self, title: str) -> None:
        """Train and display the steps."""
        running = self.trainer.view.running_operators
        with (
            TrainingProgress(self.trainer.total_steps, title, SAMPLES_EVERY, running=running) as progress,
            Alive(progress.console.print, progress.activity, None if progress.is_live else ALIVE_SECONDS) as alive,
        ):

            def show(report: StepReport) -> None:
                self.rewards.append(report.metrics["critic/score/mean"])
                samples = None
                if report.step % SAMPLES_EVERY in (0, 1) or report.step == report.total_steps:
                    rows = self._random.sample(range(len(report.batch)), 4)
                    chosen = generations(report.batch, self.trainer.tokenizer, rows)
                    samples = [(row["input"], row["output"], row["score"]) for row in chosen]
                progress.update(report.step, report.metrics, report.timings, samples)
                if report.step % SAMPLES_EVERY == 0:  # a line was printed
                    alive.reset()

            self.trainer.on_step.append(show)
            self.trainer.fit()

    def table(self) -> Table:
        """Test questions with the responses before and after training."""
        table = Table("question", "before", "after", "answer", box=None, header_style="dim")
        for before, after in zip(self.answers[0], self.answers[-1]):
            texts = (arithmetic.question_in(before["input"]), before["output"], after["output"], before["gts"])
            table.add_row(*(" ".join(str(text).split()) for text in texts))
        return table


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, or the folder of a HuggingFace model")
    parser.add_argument("--steps", type=STEPS, default=12, help="RL steps (default 12)")
    parser.add_argument(
        "--test-rows", type=whole_number(1, arithmetic.TEST_ROWS), default=200, help="held-out questions (default 200)"
    )
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/showcase"), help="default: outputs/showcase")
    parser.add_argument("override", nargs="*", metavar="key=value", help="any config key")
    args = parser.parse_args(argv)
    check_output_folder(parser, args.out, WRITTEN)
    return args


def main(argv: list[str] | None = None) -> int:
    """Find the model, train it, and print the result. Returns the exit status."""
    args = arguments(argv)
    setup_logging()
    logging.getLogger("verl").setLevel(logging.WARNING)
    console = Console()
    with user_errors(), Alive(console.print, lambda: "looking for the model, downloading and converting it"):
        say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
        model = find_model(None if args.model == "smollm2" else args.model, say)
    start = time.perf_counter()
    shutil.rmtree(args.out, ignore_errors=True)
    rows = PROMPTS * args.steps
    data = arithmetic.write_arithmetic(args.out / "data", rows, args.test_rows, args.seed)
    console.print(
        f"{model.name}, {torch.get_num_threads()} threads: {args.steps} steps of GRPO, {PROMPTS} prompts x {SAMPLES} "
        f"responses\naccuracy on {args.test_rows} held-out questions is measured before and after",
        highlight=False,
    )
    overrides = [*settings(model, data, args.out / "rl", args.steps, args.seed), *args.override]
    with user_errors(), Alive(console.print, lambda: "reading the model and the data"):
        showcase = Showcase(overrides, args.seed)
    try:
        showcase.run(f"GRPO of {model.name} on sums of two-digit numbers")
    except Stopped:
        if saved := showcase.trainer.checkpoints.latest():
            say(f"model so far: {saved / 'actor' / 'huggingface'}  (HuggingFace format)")
        raise
    report(console, showcase, args, time.perf_counter() - start)
    return 0


def report(console: Console, showcase: Showcase, args: argparse.Namespace, seconds: float) -> None:
    """Print accuracies, responses before and after, and the curves."""
    window = max(1, min(5, len(showcase.rewards) // 2))
    first, last = (sum(part) / window for part in (showcase.rewards[:window], showcase.rewards[-window:]))
    before, after = showcase.accuracies[0], showcase.accuracies[-1]
    console.print()
    console.print(showcase.table())
    console.print(
        f"\n[bold]accuracy {before:.2f} -> {after:.2f} on {args.test_rows} held-out questions, greedy[/bold]\n"
        f"mean reward {first:.2f} -> {last:.2f} (first and last {window} of {args.steps} steps); {seconds:.0f} s",
        highlight=False,
    )
    curves = save_curves(args.out / "rl" / "metrics.jsonl", args.out / "curves.png")
    saved = args.out / "rl" / f"global_step_{args.steps}" / "actor" / "huggingface"
    commands = next_steps(showcase.trainer.config, saved, args.out / "rl")
    ends = [f"curves: {curves}", f"model:  {saved}  (HuggingFace format)", *commands]
    console.print("\n".join(ends), highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
