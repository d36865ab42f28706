"""Learning curves of preference losses, of reward models, and of GRPO on their scores, each with a control.

    python benchmarks/preferences.py --seeds 1 2 3 --out benchmarks/results/preferences_cpu.json

The task: of two responses, the one with more letters `a` is preferred. A tiny Llama of random weights learns it from
pairs, or from labels (KTO). The control has the same pairs with random preferences; both are evaluated on held-out
pairs with the true ones. Then GRPO and online DPO maximize the reward model, and GRPO the grades of a judge (a local
endpoint that counts; in the control its grades are random): `true` is the share of `a` in their responses, which they
do not see. Each record has the first and the last value of its measure, and the curve. Needs starlette and uvicorn.
"""

import argparse
import contextlib
import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.quickstart.tiny_model import tiny_model
from verl.recipe.dpo import DPOTrainer, OfflineDPOTrainer
from verl.recipe.rm import RMTrainer
from verl.trainer.local_trainer import LocalPPOTrainer

LETTERS, LENGTH, STEPS, EVERY = "abcdef", 8, 60, 10
#: settings of a loss, so that all have moved after 60 steps of a random model
LOSSES: dict[str, list[str]] = {
    "dpo": [],
    "ipo": [],
    "kto": [],
    "simpo": [],
    "orpo": ["dpo.beta=1"],
}


@contextlib.contextmanager
def judge(control: bool) -> Iterator[str]:
    """The URL of an endpoint that grades a response by its share of a, or at random."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from verl.server.http import ServerThread

    async def complete(request: Any) -> JSONResponse:
        text = (await request.json())["messages"][0]["content"]
        grade = random.Random(text).random() if control else text.count("a") / max(len(text), 1)
        message = {"content": f"It has some a.\nScore: {10 * grade:.2f}"}
        return JSONResponse({"choices": [{"message": message}], "usage": {"prompt_tokens": len(text)}})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    with ServerThread(app) as server:
        yield f"{server.url}/v1"


def word(draw: random.Random) -> str:
    return "".join(draw.choice(LETTERS) for _ in range(LENGTH))


def pairs(count: int, seed: int, control: bool) -> Iterator[dict[str, Any]]:
    """Pairs of random words with different numbers of a; in the control, either is preferred."""
    draw = random.Random(seed)
    while count:
        better, worse = sorted((word(draw), word(draw)), key=lambda text: -text.count("a"))
        if better.count("a") == worse.count("a"):
            continue
        flips = control and draw.random() < 0.5
        yield {
            "prompt": f"{word(draw)[:2]}=",
            "chosen": worse if flips else better,
            "rejected": better if flips else worse,
        }
        count -= 1


def labels(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The responses of pairs with their labels."""
    sides = {"chosen": True, "rejected": False}
    return [{"prompt": row["prompt"], "completion": row[side], "label": sides[side]} for row in rows for side in sides]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def curve(path: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [round(line[name], 4) for line in lines if name in line]


def offline(folder: Path, method: str, seed: int, control: bool) -> dict[str, Any]:
    """Train a policy or a reward model on the pairs; the measure is the accuracy (KTO: margin) on held-out pairs."""
    rows, held_out = list(pairs(1000, seed, control)), list(pairs(200, 1000 + seed, False))
    measure = "val/rewards/accuracies"
    if method == "kto":
        rows, held_out, measure = labels(rows), labels(held_out), "margin"
    run = folder / f"{method}-{seed}-{'control' if control else 'preferences'}"
    run.mkdir(parents=True)
    settings = [
        f"data.train_files={write(run / 'train.jsonl', rows)}",
        f"data.val_files={write(run / 'held_out.jsonl', held_out)}",
        "data.train_batch_size=32",
        "data.use_dynamic_bsz=false",
        "data.micro_batch_size_per_gpu=64",
        f"model.path={folder / f'model-{seed}'}",
        "optim.lr=2e-3",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=100",
        f"trainer.test_freq={EVERY}",
        f"trainer.default_local_dir={run}",
        "trainer.resume_mode=disable",
        "trainer.logger=[jsonl]",
    ]
    trainer = RMTrainer if method == "rm" else OfflineDPOTrainer
    trainer(overrides=[*settings, *([] if method == "rm" else [f"dpo.loss={method}", *LOSSES[method]])]).fit()
    if measure != "margin":
        values = curve(run, measure)
    else:
        sides = [curve(run, f"val/rewards/{side}") for side in ("chosen", "rejected")]
        values = [round(better - worse, 4) for better, worse in zip(*sides)]
    return {"method": method, "seed": seed, "control": control, "measure": measure, "curve": values}


def online(folder: Path, method: str, seed: int, control: bool) -> dict[str, Any]:
    """Maximize the scores of the reward model of `offline`, or the grades of `judge`; the measure is the share of a in
    the responses."""
    run = folder / f"{method}-{seed}-{control}"
    run.mkdir(parents=True)
    model = folder / f"rm-{seed}-{'control' if control else 'preferences'}" / f"global_step_{STEPS}" / "actor"
    reward = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={model / 'huggingface'}"]
    prompts = [{"prompt": row["prompt"]} for row in pairs(256, 2000 + seed, False)]
    settings = [
        f"data.train_files={write(run / 'prompts.jsonl', prompts)}",
        "data.train_batch_size=16",
        "data.max_prompt_length=4",
        f"data.max_response_length={LENGTH + 1}",
        f"actor_rollout_ref.model.path={folder / f'model-{seed}'}",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=4",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=100",
        f"trainer.default_local_dir={run}",
        "trainer.resume_mode=disable",
        "trainer.save_at_end=false",
        "trainer.logger=[jsonl]",
    ]
    values: list[float] = []
    with judge(control) if method == "judge" else contextlib.nullcontext() as url:
        if url is not None:
            keys = {"url": url, "model": "counter", "template": "{response}", "cache": str(run / "cache.sqlite")}
            more = [f"+reward.{key}={json.dumps(value)}" for key, value in keys.items()]
            reward = ["reward.reward_function=judge", *more]
        trainer = (DPOTrainer if method == "online dpo" else LocalPPOTrainer)(overrides=[*settings, *reward])

        def record(report: Any) -> None:
            texts = trainer.tokenizer.batch_decode(report.batch.batch["responses"], skip_special_tokens=True)
            values.append(round(sum(text.count("a") for text in texts) / max(sum(map(len, texts)), 1), 4))

        trainer.on_step.append(record)
        trainer.fit()
    return {"method": method, "seed": seed, "control": control, "measure": "true", "curve": values}


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the first and the last value of its curve; of training curves, the mean of ten steps."""
    values = record["curve"]
    size = 10 if record["measure"] == "true" else 1
    ends = {"first": values[:size], "last": values[-size:]}
    return record | {name: round(sum(part) / len(part), 4) for name, part in ends.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--methods", nargs="+", default=["rm", "grpo", "online dpo", "judge", *LOSSES])
    parser.add_argument("--out", type=Path, required=True, help="JSON file; records of other methods in it are kept")
    options = parser.parse_args()
    records = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
    records = [each for each in records if each["method"] not in options.methods]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in options.seeds:
            logging.disable(logging.INFO)
            tiny_model("llama", folder / f"model-{seed}", seed)
            for method in options.methods:
                for control in (False, True):
                    run = online if method in ("grpo", "online dpo", "judge") else offline
                    records.append(summary(run(folder, method, seed, control)))
                    print(json.dumps({k: v for k, v in records[-1].items() if k != "curve"}), flush=True)
                    options.out.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
