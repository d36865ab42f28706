"""Train a tiny language model to use a tool or to play a game, on a CPU, in a few minutes.

    python examples/tools/run.py calculator        # or search, search_r1, retool, guess, walk
    python examples/tools/run.py calculator --shuffle-rewards     # control: no improvement expected

The script creates a model with 0.4M random parameters and a chat template, warms it up with SFT on demonstrations of
which most are wrong, and trains it with GRPO: 16 or 32 prompts x 8 trajectories per step. It prints and saves the mean
reward on 200 held-out prompts, sampled as in training, before and after.
"""

import argparse
import importlib
import json
import logging
import shutil
import sys
import time
from pathlib import Path
from random import Random
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from anywhere, installed or not

import torch
from transformers import AutoTokenizer

from examples.quickstart.tiny_model import tiny_model
from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils.log import setup_logging

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parents[1] / "recipe"
ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
SETTINGS = {
    "calculator": [f"{MULTI_TURN}.function_tool_path={HERE / 'calculator.py'}"],
    "search": [f"{MULTI_TURN}.tool_config_path={HERE / 'search_tool.yaml'}"],
    "search_r1": [
        f"{MULTI_TURN}.enable=false",
        f"{ROLLOUT}.agent.default_agent_loop=search_r1",
        f"{ROLLOUT}.agent.agent_loop_config_path={RECIPES / 'search_r1/agent.yaml'}",
        f"{ROLLOUT}.stop=[</answer>]",
        "reward.custom_reward_function.path=null",
    ],
    "retool": [
        f"{MULTI_TURN}.enable=false",
        f"{ROLLOUT}.agent.default_agent_loop=retool",
        f"{ROLLOUT}.agent.agent_loop_config_path={RECIPES / 'retool/agent.yaml'}",
        f"{ROLLOUT}.stop=[</answer>]",
        f"reward.custom_reward_function.path={RECIPES / 'retool/interpreter.py'}",
    ],
    "guess": [f"{MULTI_TURN}.interaction_config_path={HERE / 'guess_interaction.yaml'}"],
    "walk": [
        f"{MULTI_TURN}.interaction_config_path={HERE / 'walk_environment.yaml'}",
        "reward.reward_function=agent_score",
        "reward.custom_reward_function.path=null",
    ],
}
#: per step
PROMPTS = {"calculator": 16, "search": 16, "search_r1": 16, "retool": 8, "guess": 32, "walk": 32}
MOST_TURNS = {"calculator": 2, "search": 2, "search_r1": 2, "retool": 2, "guess": 3, "walk": 4}
WARM_UP_STEPS = {"calculator": 400, "search": 400, "search_r1": 400, "retool": 1000, "guess": 120, "walk": 120}
TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def warm_up(task: ModuleType, name: str, out: Path, seed: int) -> Path:
    """Create a model and train it on demonstrations. Returns its folder."""
    steps, random = WARM_UP_STEPS[name], Random(seed)
    tools = [{"role": "system", "content": f"Tools: {name}"}] if name in ("calculator", "search") else []
    chats = [[*tools, *task.demonstration(random)] for _ in range(64 * steps)]
    texts = [message["content"] for chat in chats[:4000] for message in chat]
    tiny_model("qwen2", out / "model", seed=seed, texts=texts)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out / "model")
    (out / "sft.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    trainer = SFTTrainer(
        overrides=[
            f"model.path={out / 'model'}",
            "model.enable_gradient_checkpointing=false",
            f"data.train_files={out / 'sft.jsonl'}",
            "data.train_batch_size=64",
            "data.max_length=256",
            "optim.lr=2e-3",
            "optim.lr_warmup_steps=20",
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={steps}",
            f"trainer.seed={seed}",
            f"trainer.default_local_dir={out / 'sft'}",
            "trainer.logger=[jsonl]",
        ]
    )
    print(f"warm-up: {steps} steps of supervised fine-tuning on {len(chats):,} demonstrations", flush=True)
    trainer.on_step.append(lambda report: show_warm_up(report, steps))
    trainer.fit()
    return trainer.checkpoints.latest() / "actor" / "huggingface"


def show_warm_up(report: StepReport, steps: int) -> None:
    if report.step % 50 == 0:
        print(f"warm-up step {report.step:4} of {steps}  loss {report.metrics['train/nll']:.3f}", flush=True)


def learn(args: argparse.Namespace, task: ModuleType, model: Path) -> list[dict[str, float]]:
    """Train with GRPO. Returns the metrics of every step, including those before the first step."""
    for name, seed, rows in (("train", args.seed + 100, PROMPTS[args.task] * args.steps), ("test", 0, 200)):
        random = Random(seed)
        lines = [json.dumps(task.row(random)) + "\n" for _ in range(rows)]
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    if hasattr(task, "prepare"):
        task.prepare(args.out)
    trainer = LocalPPOTrainer(
        overrides=[
            "algorithm.name=grpo",
            f"algorithm.shuffle_rewards={str(args.shuffle_rewards).lower()}",
            f"data.train_files={args.out / 'train.jsonl'}",
            f"data.val_files={args.out / 'test.jsonl'}",
            f"data.train_batch_size={PROMPTS[args.task]}",
            "data.max_prompt_length=64",
            "data.max_response_length=128",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            f"{MULTI_TURN}.enable=true",
            f"{MULTI_TURN}.max_assistant_turns={MOST_TURNS[args.task]}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS[args.task]}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.use_kl_loss=false",
            f"reward.custom_reward_function.path={HERE / args.task}.py",
            *SETTINGS[args.task],
            f"trainer.total_training_steps={args.steps}",
            f"trainer.test_freq={args.test_freq}",
            "trainer.val_before_train=true",
            "trainer.save_at_end=false",
            f"trainer.seed={args.seed}",
            f"trainer.default_local_dir={args.out / 'rl'}",
            "trainer.logger=[jsonl]",
            "trainer.resume_mode=disable",
            *args.override,
        ]
    )
    curve: list[dict[str, float]] = []
    start = time.perf_counter()

    def show(report) -> None:
        names = ("critic/score/mean", "rollout/turns", "rollout/tool_calls", "rollout/tool_errors")
        curve.append({"step": report.step, **{name: report.metrics.get(name, 0.0) for name in names}})
        if report.step % 10 == 1 or report.step == trainer.total_steps:
            figures = "  ".join(f"{name.split('/')[1]} {curve[-1][name]:.3f}" for name in names)
            print(f"step {report.step:4}  {time.perf_counter() - start:5.0f} s  {figures}", flush=True)

    trainer.on_step.append(show)
    trainer.fit()
    return curve


def validation(out: Path) -> list[tuple[int, float]]:
    """(step, mean reward of the held-out prompts) of a run, from its log."""
    (log,) = (out / "rl").rglob("metrics.jsonl")
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    rewards = []
    for record in records:
        rewards += [(record["step"], value) for key, value in record.items() if key.endswith("reward/mean@1")]
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=60, help="RL steps")
    parser.add_argument("--test-freq", type=int, default=20, help="steps between validations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="default: outputs/tools/<task>[-shuffled]")
    parser.add_argument("--warm", type=Path, default=None, help="a model that is warmed up already")
    parser.add_argument("--shuffle-rewards", action="store_true", help="control: shuffle the rewards")
    parser.add_argument("override", nargs="*", metavar="key=value", help="any config key")
    args = parser.parse_args()
    setup_logging()
    logging.getLogger("verl").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # matrices this small do not benefit from more threads
    name = args.task + ("-shuffled" if args.shuffle_rewards else "")
    args.out = args.out or Path("outputs/tools") / name
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    task, start = importlib.import_module(f"examples.tools.{args.task}"), time.perf_counter()
    model = args.warm or warm_up(task, args.task, args.out, args.seed)
    print(f"model {model} warmed up after {time.perf_counter() - start:.0f} s", flush=True)
    curve = learn(args, task, model)
    held_out = validation(args.out)
    result = {"task": name, "seed": args.seed, "seconds": round(time.perf_counter() - start), "held_out": held_out}
    (args.out / "curve.json").write_text(json.dumps({**result, "curve": curve}) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
