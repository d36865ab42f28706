"""Train the agent of guess_agent.py on a CPU, with a tiny language model, in a few minutes.

    python examples/server_agent/run.py
    python examples/server_agent/run.py --shuffle-rewards     # control: no improvement expected

The model has 0.4M random parameters and is warmed up with SFT on random guesses, as in examples/tools/run.py. The
secret number is always even, which the policy has to find out: three random guesses from 1 to 7 find it with
probability 0.37, three random even ones with 0.70, and three that use the hints always.
"""

import argparse
import json
import logging
import shutil
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from anywhere, installed or not

import torch

from examples.tools import guess
from examples.tools.run import warm_up
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.utils.log import setup_logging

HERE = Path(__file__).resolve().parent
ROLLOUT = "actor_rollout_ref.rollout"


def learn(args: argparse.Namespace, model: Path) -> list[float]:
    """Train with GRPO. Returns the mean score of every step."""
    random, prompt = Random(args.seed + 100), [{"role": "user", "content": "Guess a number from 1 to 7."}]
    secrets = [random.choice((2, 4, 6)) for _ in range(32 * args.steps)]
    lines = [json.dumps({"prompt": prompt, "answer": str(secret)}) + "\n" for secret in secrets]
    (args.out / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    trainer = LocalPPOTrainer(
        overrides=[
            "algorithm.name=grpo",
            f"algorithm.shuffle_rewards={str(args.shuffle_rewards).lower()}",
            f"data.train_files={args.out / 'train.jsonl'}",
            "data.train_batch_size=32",
            "data.max_prompt_length=64",
            "data.max_response_length=128",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            f"{ROLLOUT}.n=8",
            f"{ROLLOUT}.mode=server",
            f"{ROLLOUT}.server.agent.path={HERE / 'guess_agent.py'}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.use_kl_loss=false",
            f"trainer.total_training_steps={args.steps}",
            "trainer.val_before_train=false",
            "trainer.save_at_end=false",
            f"trainer.seed={args.seed}",
            f"trainer.default_local_dir={args.out / 'rl'}",
            "trainer.logger=[jsonl]",
            "trainer.resume_mode=disable",
            *args.override,
        ]
    )
    scores, start = [], time.perf_counter()

    def show(report) -> None:
        scores.append(report.metrics["critic/score/mean"])
        if report.step % 5 == 1 or report.step == trainer.total_steps:
            turns = report.metrics["rollout/turns"]
            seconds = time.perf_counter() - start
            print(f"step {report.step:3}  {seconds:4.0f} s  score {scores[-1]:.3f}  turns {turns:.2f}", flush=True)

    trainer.on_step.append(show)
    trainer.fit()
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/server_agent"))
    parser.add_argument("--warm", type=Path, default=None, help="a model that is warmed up already")
    parser.add_argument("--shuffle-rewards", action="store_true", help="control: shuffle the rewards")
    parser.add_argument("override", nargs="*", metavar="key=value", help="any config key")
    args = parser.parse_args()
    setup_logging()
    for name in ("verl", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    torch.set_num_threads(1)  # matrices this small do not benefit from more threads
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    model = args.warm or warm_up(guess, "guess", args.out, args.seed)
    scores = learn(args, model)
    first, last = (sum(part) / len(part) for part in (scores[:5], scores[-5:]))
    print(f"mean score: {first:.2f} in the first 5 steps, {last:.2f} in the last 5")


if __name__ == "__main__":
    main()
