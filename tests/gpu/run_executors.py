"""On a machine with GPUs: every executor gives the numbers of one GPU, and what sharding, offloading and overlap bring.

    python tests/gpu/run_executors.py [--out FILE.json] [--seconds 150] [--only WORDS] [--device cpu]

golden   three steps of a tiny model over 2 and 4 GPUs (NCCL), by sequence parallelism, tensor parallelism, offloading
         and separate pools, against the same steps on one GPU. float32 must agree to 1e-3 of each metric (sums run
         in another order), bf16 to 0.15 (one device casts operation by operation, FSDP casts whole layers, so a few
         sampled tokens differ). Overlap must agree with its like to the last bit.
memory   two steps at the shape of Qwen2.5-0.5B with random weights: peak memory per GPU, seconds of the second step.
overlap  the same with actor and critic in separate pools, one after another and at the same time.

Every variant is a process with separate GPUs, several at a time; --seconds: none starts later than that.
--only: those whose name has one of these words. --device cpu tries the script itself, without GPUs.
Prints a table last; exits with 1 when one failed or numbers disagree.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

COMPARED = ("critic/score/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss")
TOLERANCE = {"fp32": 1e-3, "bf16": 0.15}
ACTOR, REF, CRITIC = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"
POOLS = ["placement.actor_devices=[0,1]", "placement.critic_devices=[2,3]", "placement.ref_devices=[2,3]"]
OFFLOAD = [f"{ACTOR}.param_offload=true", f"{ACTOR}.optimizer_offload=true", f"{REF}.param_offload=true"]
OFFLOAD += [f"{CRITIC}.param_offload=true", f"{CRITIC}.optimizer_offload=true"]


@dataclass(frozen=True)
class Variant:
    """One run. like: the name of the variant that it must agree with; exactly: to the last bit."""

    name: str
    kind: str
    gpus: int
    overrides: tuple[str, ...]
    like: str | None = None
    exactly: bool = False
    dtype: str = "fp32"


def variants() -> list[Variant]:
    """All of them, the most telling first."""
    found = []

    def golden(algorithm: str, dtype: str, what: str, gpus: int, *extra: str, like: str | None = None) -> None:
        base = f"{algorithm} {dtype}, 1 GPU"
        chosen = (f"algorithm.name={algorithm}", *(f"{section}.dtype={dtype}" for section in (ACTOR, REF, CRITIC)))
        chosen += (f"trainer.n_gpus_per_node={gpus}",)
        chosen += (*(["algorithm.use_kl_in_reward=true"] if algorithm == "ppo" else []), *extra)
        name = f"{algorithm} {dtype}, {what}"
        agrees = None if name == base else like or base
        found.append(Variant(name, "golden", gpus, chosen, agrees, exactly=like is not None, dtype=dtype))

    def half(kind: str, what: str, gpus: int, *extra: str, like: str | None = None) -> None:
        chosen = (f"trainer.n_gpus_per_node={gpus}", *extra)
        found.append(Variant(f"0.5B {what}", kind, gpus, chosen, like, exactly=like is not None, dtype="bf16"))

    grpo, ppo = ("algorithm.name=grpo",), ("algorithm.name=ppo", "algorithm.use_kl_in_reward=true")
    for algorithm in ("ppo", "grpo"):
        for dtype in ("fp32", "bf16"):
            golden(algorithm, dtype, "1 GPU", 1)
    golden("ppo", "fp32", "2 GPUs", 2)
    golden("ppo", "fp32", "2 share sequences", 2, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    golden("ppo", "fp32", "2, offload between phases", 2, *OFFLOAD)
    golden("ppo", "fp32", "2, offload policy", 2, f"{ACTOR}.offload_policy=true", f"{CRITIC}.offload_policy=true")
    golden("ppo", "fp32", "4, two pools", 4, *POOLS)
    golden("ppo", "fp32", "4, two pools overlap", 4, *POOLS, "trainer.overlap=true", like="ppo fp32, 4, two pools")
    half("memory", "1 GPU", 1, *grpo)
    half("memory", "2 GPUs, sharded", 2, *grpo)
    half("memory", "2 GPUs, offload between phases", 2, *grpo, *OFFLOAD[:2])
    half("memory", "2 GPUs, offload policy", 2, *grpo, f"{ACTOR}.offload_policy=true")
    half("overlap", "4 GPUs, two pools", 4, *ppo, *POOLS)
    half("overlap", "4 GPUs, two pools overlap", 4, *ppo, *POOLS, "trainer.overlap=true", like="0.5B 4 GPUs, two pools")
    golden("grpo", "bf16", "2 GPUs", 2)
    golden("ppo", "bf16", "2 share sequences", 2, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    golden("grpo", "fp32", "2 share layers", 2, f"{ACTOR}.tensor_parallel_size=2")
    golden("ppo", "fp32", "4 GPUs", 4)
    golden("ppo", "bf16", "4 GPUs", 4)
    half("memory", "4 GPUs, sharded", 4, *grpo)
    return found


# ---- one variant, in a separate process ---------------------------------------------------------------------------


def overrides_of(variant: Variant, folder: Path, device: str) -> list[str]:
    from tests.trainer.conftest import run_settings

    run = ["trainer.resume_mode=disable", f"trainer.device={device}"]
    if variant.kind == "golden":
        tiny = [*run_settings(folder / "tiny", folder / "runs" / variant.name), "data.train_batch_size=8"]
        return [*tiny, "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=3", *run]
    sums = sums_overrides(folder, "half", variant.name)
    return [*sums, "data.max_response_length=64", "trainer.total_training_steps=2", *run]


def sums_overrides(folder: Path, model: str, run: str) -> list[str]:
    """Settings of a run with the rows of `prepare`."""
    return [
        f"data.train_files={folder / 'sums.jsonl'}",
        "data.train_batch_size=16",
        f"actor_rollout_ref.model.path={folder / model}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "reward.reward_function=accuracy_reward",
        f"trainer.default_local_dir={folder / 'runs' / run}",
        "trainer.logger=[jsonl]",
        "trainer.val_before_train=false",
    ]


def train(overrides: list[str], results: Path) -> None:
    """Run the steps and write what they reported to a file."""
    from verl.trainer.base import StepReport
    from verl.trainer.local_trainer import LocalPPOTrainer

    trainer, steps = LocalPPOTrainer(overrides=overrides), []

    def record(report: StepReport) -> None:
        numbers = {name: float(value) for name, value in report.metrics.items() if isinstance(value, int | float)}
        steps.append(numbers | {"seconds_of_all": sum(report.timings.values())})

    trainer.on_step.append(record)
    trainer.fit()
    results.write_text(json.dumps(steps))


def prepare(folder: Path) -> None:
    """A tiny model with its rows, and a random model of the shape of Qwen2.5-0.5B with the tiny tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from examples.quickstart.tiny_model import tiny_model
    from tests.trainer.conftest import make_tiny

    (folder / "tiny").mkdir()
    make_tiny(folder / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("qwen2", folder / "tokenizer", seed=0))
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "half")
    tokenizer.save_pretrained(folder / "half")
    rows = [json.dumps({"prompt": f"What is {i} plus {i + 1}?", "answer": str(2 * i + 1)}) for i in range(64)]
    (folder / "sums.jsonl").write_text("\n".join(rows) + "\n")


# ---- all of them ----------------------------------------------------------------------------------------------------


class Devices:
    """GPUs that are free; who wants some waits until there are enough."""

    def __init__(self, count: int):
        self.free = list(range(count))
        self._changed = Condition()

    def take(self, count: int, until: float) -> list[int] | None:
        """`count` of them; None when there were not enough before `until`."""
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self.free) >= count, until - time.monotonic())
            taken = [self.free.pop(0) for _ in range(count)] if enough else None
            return taken if time.monotonic() < until else self._put(taken)

    def _put(self, devices: list[int] | None) -> None:
        self.free += devices or []

    def give_back(self, devices: list[int]) -> None:
        with self._changed:
            self._put(devices)
            self._changed.notify_all()


def execute(variant: Variant, devices: list[int], folder: Path, device: str) -> dict[str, Any]:
    """Run a variant on these GPUs; a row of the table, and the end of its log where it failed."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", variant.name, "--folder", str(folder), "--device", device]
    start = time.monotonic()
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    row: dict[str, Any] = {"variant": variant.name, "test": variant.kind, "gpus": variant.gpus}
    row["seconds"] = round(time.monotonic() - start, 1)
    if done.returncode:
        print(f"--- {variant.name} failed\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}", flush=True)
        return row | {"ok": False}
    last = json.loads((folder / f"{variant.name}.json").read_text())[-1]
    row["seconds_per_step"] = round(last["timing_s/step"], 3)
    if variant.kind != "golden":
        row["peak_gib_per_gpu"] = round(last.get("perf/max_memory_allocated_gb", 0.0), 2)
    if any("overlap=true" in override for override in variant.overrides):
        row["seconds_of_all_operators"] = round(last["seconds_of_all"], 3)
    return row | {"ok": True}


def disagreement(found: list[dict], expected: list[dict]) -> float:
    """The largest difference of a compared metric over the first two steps, relative to its size (at least 0.05).

    Two steps: a token that is sampled otherwise at a third step makes every later number another one.
    """
    worst = 0.0
    for a, b in zip(found[:2], expected[:2], strict=True):
        for name in COMPARED:
            if name in b:
                worst = max(worst, abs(a[name] - b[name]) / max(abs(b[name]), 0.05))
    return worst


def compare(chosen: list[Variant], rows: dict[str, dict], folder: Path) -> None:
    """Add to each row how far the variant is from the one that it must agree with."""
    for variant in chosen:
        row, other = rows[variant.name], rows.get(variant.like)
        if variant.like is None or not row["ok"] or "note" in row:
            continue
        if other is None or not other["ok"] or "note" in other:
            row |= {"ok": False, "note": f"nothing to compare with: {variant.like!r} did not run"}
            continue
        found, expected = (json.loads((folder / f"{n}.json").read_text()) for n in (variant.name, variant.like))
        worst = disagreement(found, expected)
        row["largest_difference"] = round(worst, 7)
        row["ok"] = worst == 0 if variant.exactly else worst < TOLERANCE[variant.dtype]


_SKIPPED = "not run: too few GPUs or no time left"


def run_all(
    chosen: Sequence[Any],
    devices: Devices,
    run: Callable[[Any, list[int]], dict[str, Any]],
    until: float,
    failed: Callable[[Any], dict[str, Any]],
    skipped: Callable[[Any], dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Every variant as soon as there are GPUs for it, in their order; those of more GPUs are not overtaken.

    Args:
        chosen: objects with `name` and `gpus`.
        devices: the GPUs.
        run: (variant, its GPUs) -> its row.
        until: when the last one may start.
        failed, skipped: variant -> the row of one whose `run` raises, and of one that does not start.
    """
    rows: dict[str, dict[str, Any]] = {}

    def work(variant: Any, taken: list[int]) -> None:
        try:
            rows[variant.name] = run(variant, taken)
        except Exception:
            traceback.print_exc()
            rows[variant.name] = failed(variant)
        finally:
            devices.give_back(taken)
        print(json.dumps(rows[variant.name]), flush=True)

    with ThreadPoolExecutor(8) as threads:
        for variant in chosen:
            taken = devices.take(variant.gpus, until)
            if taken is None:
                rows[variant.name] = skipped(variant)
                continue
            threads.submit(work, variant, taken)
    return {variant.name: rows[variant.name] for variant in chosen}


def installed_gpus() -> list[str]:
    """Name and driver of each; none where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()


def machine() -> dict[str, Any]:
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions = {"python": platform.python_version()} | versions
    return {"gpus": installed_gpus(), "versions": versions, "tolerance": TOLERANCE}


def argument_parser(description: str, results: str, seconds: float) -> argparse.ArgumentParser:
    """results: name of the default file of results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / results)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = argument_parser(__doc__, "executors_gpu.json", 150.0).parse_args()
    if args.one:
        (variant,) = [v for v in variants() if v.name == args.one]
        overrides = [*overrides_of(variant, args.folder, args.device), *variant.overrides]
        train(overrides, args.folder / f"{variant.name}.json")
        return 0
    begun = time.monotonic()
    gpus = len(installed_gpus()) if args.device == "cuda" else 4
    named = [v for v in variants() if not args.only or any(word in v.name or word == v.kind for word in args.only)]
    asked = {v.like for v in named} | {v.name for v in named}
    chosen = [v for v in variants() if v.name in asked and v.gpus <= gpus]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        rows = run_all(
            chosen,
            Devices(gpus),
            lambda variant, taken: execute(variant, taken, folder, args.device),
            begun + args.seconds - 25,  # what is begun may end
            failed=lambda v: {"variant": v.name, "test": v.kind, "gpus": v.gpus, "ok": False},
            skipped=lambda v: {"variant": v.name, "test": v.kind, "ok": True, "note": _SKIPPED},
        )
        compare(chosen, rows, folder)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"command": "python tests/gpu/run_executors.py"} | machine() | {"results": list(rows.values())}
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.monotonic() - begun:.0f} s in all")
    for row in rows.values():
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    return 0 if all(row["ok"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
