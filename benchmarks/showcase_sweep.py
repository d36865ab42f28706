"""Which settings of the showcase learn fastest: variants in parallel, each pinned to two CPU cores.

    python benchmarks/showcase_sweep.py MODEL [--only NAMES] [--seconds 300] [--minutes 9.5] [--out FOLDER]

MODEL: the folder of SmolLM2-135M-Instruct. Each variant runs GRPO on its task until its training steps have taken
`--seconds` (validation and start-up are not counted). One JSON line per variant when it ends: accuracy on held-out
expressions that are not those of the showcase's test, greedy, over steps, seconds and CPU seconds; a table at the end.
As many variants run at a time as there are pairs of cores; those that cannot end within `--minutes` are cut, with what
they have so far.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.quickstart import arithmetic

ROOT = Path(__file__).resolve().parents[1]
ASK = "What is {}? Reply with the number only."


def _chat(*turns: str) -> Callable[[str], list[dict[str, str]]]:
    roles = ["system", *["user", "assistant"] * len(turns)]
    return lambda e: [{"role": role, "content": turn.format(e)} for role, turn in zip(roles, turns)]


STYLES: dict[str, Callable[[str], list[dict[str, str]] | str]] = {
    "default": lambda e: [{"role": "user", "content": ASK.format(e)}],
    "empty": _chat("", ASK),
    "system": _chat("Answer with a number.", "What is {}?"),
    "example": _chat("Answer with a number.", "23 + 45 =", "68", "{} ="),
    "ask-example": _chat("", "What is 23 + 45?", "68", "What is {}?"),
    # texts, without the chat template; the first has its markup, without a system message
    "short": lambda e: f"<|im_start|>user\nWhat is {e}?<|im_end|>\n<|im_start|>assistant\n",
    "text": lambda e: f"23 + 45 = 68\n{e} =",
    "text2": lambda e: f"23 + 45 = 68\n37 + 48 = 85\n{e} =",
    "bare": lambda e: f"{e} =",
}


def two_and_one_digit(random: Random) -> tuple[str, int]:
    a, b = random.randint(10, 99), random.randint(1, 9)
    return f"{a} + {b}", a + b


def three_digits(random: Random) -> tuple[str, int]:
    a, b, c = (random.randint(1, 9) for _ in range(3))
    return f"{a} + {b} + {c}", a + b + c


def differences(random: Random) -> tuple[str, int]:
    """Sums and differences."""
    if random.random() < 0.5:
        return arithmetic.draw(random)
    low, high = sorted((random.randint(10, 99), random.randint(10, 99)))
    return f"{high} - {low}", high - low


TASKS: dict[str, arithmetic.Draw] = {
    "sums": arithmetic.draw,
    "2d+1d": two_and_one_digit,
    "1d+1d+1d": three_digits,
    "differences": differences,
}


@dataclass(frozen=True)
class Variant:
    """style: form of the prompt; task: one of TASKS; reward: name of a function of this file."""

    style: str = "empty"
    task: str = "sums"
    reward: str = "shaped"
    prompts: int = 16
    n: int = 8
    lr: float = 3e-5
    response: int = 16
    more: tuple[str, ...] = field(default=())


ACTOR = "actor_rollout_ref.actor."
#: a stop string at the end of the line
LINE = ('actor_rollout_ref.rollout.stop=["\\n"]',)
COSINE = (*LINE, f"{ACTOR}optim.lr_scheduler_type=cosine", f"{ACTOR}optim.total_training_steps=40")
DYNAMIC = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=score",
    "algorithm.filter_groups.max_num_gen_batches=3",
    "algorithm.filter_groups.at_limit=fill",
)


def _line(more: tuple[str, ...] = LINE, **settings: Any) -> Variant:
    """The showcase with other settings."""
    return Variant(**{"style": "text", "response": 4, "lr": 2e-5, "more": more, **settings})


VARIANTS = {
    "line": _line(),
    "line-2d+1d": _line(task="2d+1d"),
    "line-1d+1d+1d": _line(task="1d+1d+1d"),
    "line-differences": _line(task="differences"),
    "line-lr1e-5": _line(lr=1e-5),
    "line-lr3e-5": _line(lr=3e-5),
    "line-cosine3e-5": _line(COSINE, lr=3e-5),
    "two": _line(style="text2"),
    "line-exact": _line(reward="exact"),
    "line-32x4": _line(prompts=32, n=4),
    "line-8x8": _line(prompts=8),
    "line-entropy": _line((*LINE, f"{ACTOR}entropy_coeff=0.01")),
    "line-dynamic": _line((*LINE, *DYNAMIC), reward="exact"),
    # other forms of the prompt, which learn more slowly
    "text-lr3e-5": Variant("text", response=6),
    "text-lr1e-4": Variant("text", response=6, lr=1e-4),
    "example": Variant("example", response=6),
    "ask-example": Variant("ask-example", response=6),
    "short": Variant("short", response=12),
    "bare": Variant("bare", response=5, lr=1e-4),
    "empty": Variant("empty"),
    "default": Variant("default"),
}


# ------------------------------------------------------------------------------------------------------------ rewards
def shaped(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict[str, float]:
    return arithmetic.compute_score(data_source, _first_line(solution_str), ground_truth)


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict[str, float]:
    return dict.fromkeys(("score", "acc"), shaped(data_source, solution_str, ground_truth)["acc"])


def last(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> dict[str, float]:
    """Correct if the last number of the response is."""
    return dict.fromkeys(("score", "acc"), float(re.findall(r"-?\d+", solution_str)[-1:] == [ground_truth]))


def _first_line(response: str) -> str:
    return response.strip().split("\n")[0]


# ---------------------------------------------------------------------------------------------- one variant, a process
def overrides(variant: Variant, model: str, folder: Path, test_rows: int) -> list[str]:
    style = STYLES[variant.style]
    draw, seed = TASKS[variant.task], arithmetic.VALIDATION_SEED
    stream = arithmetic.train_stream(1, seed, draw)
    train = [arithmetic.row(style(e), v) for e, v in (next(stream) for _ in range(8192))]
    test = [arithmetic.row(style(e), v) for e, v in arithmetic.held_out(test_rows, seed, draw).items()]
    arithmetic.write_jsonl(folder / "train.jsonl", train)
    arithmetic.write_jsonl(folder / "test.jsonl", test)
    return [
        "algorithm.name=grpo",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'test.jsonl'}",
        f"data.train_batch_size={variant.prompts}",
        f"data.prompt_format={'text' if isinstance(style('1 + 1'), str) else 'chat'}",
        "data.max_prompt_length=96",
        f"data.max_response_length={variant.response}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.rollout.n={variant.n}",
        f"{ACTOR}ppo_mini_batch_size={variant.prompts}",
        f"{ACTOR}optim.lr={variant.lr}",
        f"{ACTOR}optim.lr_warmup_steps=3",
        f"{ACTOR}optim.weight_decay=0",
        f"{ACTOR}use_kl_loss=false",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=false",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"reward.custom_reward_function.name={variant.reward}",
        "trainer.total_training_steps=400",
        "trainer.test_freq=10",
        "trainer.save_at_end=false",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder / 'run'}",
        "trainer.logger=[jsonl]",
        *variant.more,
    ]


class TimeIsUp(Exception):
    """The training steps have taken as long as they may."""


def run_variant(name: str, model: str, folder: Path, seconds: float, test_rows: int) -> None:
    """Train; print one JSON line with the curve after each validation (the last line counts)."""
    import torch

    from verl.trainer.base import StepReport
    from verl.trainer.local_trainer import LocalPPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    variant = VARIANTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    trainer = LocalPPOTrainer(overrides=overrides(variant, model, folder, test_rows))
    spent, curve, scores, times = [0.0], [], [], []
    validate = trainer.validate

    def watched() -> dict[str, float]:
        scores = validate()
        accuracy = next(value for key, value in scores.items() if key.startswith("val-core/") and "/acc/" in key)
        curve.append({"step": trainer.global_step, "seconds": round(spent[0], 1), "accuracy": round(accuracy, 3)})
        line = {"variant": name, "curve": curve, "scores": scores[-1:], "times": times[-1:]}
        line |= {"cpu": round(time.process_time()), "tokens": lengths[-1:], "threads": torch.get_num_threads()}
        print(json.dumps(line), flush=True)
        return scores

    lengths: list[dict] = []

    def note(report: StepReport) -> None:
        spent[0] += sum(report.timings.values())
        scores.append(round(report.metrics["critic/score/mean"], 3))
        times.append({phase: round(value, 2) for phase, value in report.timings.items() if value > 0.05})
        lengths.append({key: report.metrics[key] for key in ("prompt_length/mean", "response_length/mean")})
        if spent[0] >= seconds:
            watched()
            raise TimeIsUp

    trainer.validate = watched
    trainer.on_step.append(note)
    with contextlib.suppress(TimeIsUp):
        trainer.fit()


# ------------------------------------------------------------------------------------------------------ all variants
def start(name: str, cores: list[int], args: argparse.Namespace) -> subprocess.Popen:
    """Start a variant on its cores, with its output in OUT/NAME.log."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, args.model, "--one", name, "--seconds", str(args.seconds)]
    command += ["--out", str(args.out), "--test-rows", str(args.test_rows)]
    with (args.out / f"{name}.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )


def result_of(name: str, out: Path) -> dict:
    """The last JSON line of a variant's log; its end if there is none."""
    lines = (out / f"{name}.log").read_text(errors="replace", encoding="utf-8").splitlines()
    results = [line for line in lines if line.startswith('{"variant"')]
    return json.loads(results[-1]) if results else {"variant": name, "error": lines[-3:]}


def run_all(names: list[str], args: argparse.Namespace) -> list[dict]:
    """Run the variants, one per pair of cores. Returns their results in the order in which they ended."""
    deadline = time.monotonic() + 60 * args.minutes
    cores = sorted(os.sched_getaffinity(0))
    free = [cores[i : i + 2] for i in range(0, len(cores) - 1, 2)]
    waiting, running, results = list(names), {}, []
    while waiting or running:
        late = time.monotonic() > deadline
        while waiting and free and not late:
            pair = free.pop(0)
            name = waiting.pop(0)
            running[name] = (start(name, pair, args), pair)
        for name, (process, _) in list(running.items()):
            if late:
                process.kill()
            if process.poll() is not None or late:
                process.wait()
                free.append(running.pop(name)[1])
                results.append(result_of(name, args.out))
                print(json.dumps(results[-1]), flush=True)
        if late and waiting:
            print(f"not started: {', '.join(waiting)}")
            break
        time.sleep(0.5)
    return results


def table(results: list[dict]) -> str:
    """Accuracy by steps and seconds, best last accuracy first."""
    rows = []
    for result in sorted(results, key=lambda r: -r["curve"][-1]["accuracy"] if "curve" in r else 1):
        points = [f"{p['step']}:{p['seconds']:.0f}s={p['accuracy']:.2f}" for p in result.get("curve", [])]
        rows.append(
            f"{result['variant']:<18} cpu {result.get('cpu', '?')} s  " + " ".join(points or map(str, result["error"]))
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--only", default=",".join(VARIANTS), help="comma-separated variants")
    parser.add_argument("--seconds", type=float, default=300, help="training seconds of each variant")
    parser.add_argument("--minutes", type=float, default=9.5, help="end of the whole sweep")
    parser.add_argument("--test-rows", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("outputs/showcase_sweep"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        # loaded by name, as the reward function of the run is found
        importlib.import_module("benchmarks.showcase_sweep")
        run_variant(args.one, args.model, (args.out / args.one).resolve(), args.seconds, args.test_rows)
        return
    names = args.only.split(",")
    unknown = set(names) - set(VARIANTS)
    if unknown:
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}; known: {', '.join(VARIANTS)}")
    print(table(run_all(names, args)))


if __name__ == "__main__":
    main()
