"""On a machine with GPUs: the same run on 1, 2 and 4 of them gives the same numbers; memory with and without sharding.

    python tests/gpu/run_executors.py [--out benchmarks/results/executors_gpu.json]

Part 1: three steps of grpo and ppo on a tiny model, float32 and bf16, by 1, 2 and 4 processes (NCCL), with tensor
parallelism, and with actor and critic in pools of their own. float32 must agree to 1e-3 of each metric (sums run in
another order), bf16 to 0.15 (one device casts operation by operation, FSDP casts whole layers, so a few sampled tokens
differ).
Part 2: a step at the shape of Qwen2.5-0.5B with random weights, peak memory per GPU.
Prints a table last; exits with 1 when numbers disagree.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

from tests.trainer.conftest import make_tiny, run_settings
from verl.trainer.base import StepReport
from verl.trainer.local_trainer import LocalPPOTrainer

ROOT = Path(__file__).resolve().parents[2]
COMPARED = ("critic/score/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss")
FSDP = "actor_rollout_ref.actor.fsdp_config"
TOLERANCE = {"fp32": 1e-3, "bf16": 0.15}


def run(overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of each step."""
    trainer = LocalPPOTrainer(overrides=[*overrides, "trainer.resume_mode=disable"])
    steps: list[dict[str, float]] = []

    def record(report: StepReport) -> None:
        steps.append(dict(report.metrics))

    trainer.on_step.append(record)
    trainer.fit()
    return steps


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


def golden(folder: Path, gpus: int) -> list[dict]:
    tiny = make_tiny(folder / "tiny")
    rows = []
    for dtype in ("fp32", "bf16"):
        for algorithm in ("grpo", "ppo"):
            base = [
                *run_settings(tiny, folder / "run"),
                f"algorithm.name={algorithm}",
                f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}",
                f"actor_rollout_ref.ref.fsdp_config.dtype={dtype}",
                f"critic.fsdp.dtype={dtype}",
                "trainer.total_training_steps=3",
                "data.train_batch_size=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            ]
            expected = run(base)
            apart = ["placement.actor_devices=[0,1]", "placement.critic_devices=[2,3]"]
            layers = [f"{FSDP}.tensor_parallel_size=2"]
            for ranks, pools, extra in [(2, 1, []), (2, 1, layers), (4, 1, []), (4, 1, layers), (4, 2, apart)]:
                if ranks > gpus or (pools > 1 and algorithm != "ppo"):
                    continue
                start = time.perf_counter()
                worst = disagreement(run([*base, f"trainer.n_gpus_per_node={ranks}", *extra]), expected)
                rows.append(
                    {
                        "test": "golden",
                        "algorithm": algorithm,
                        "dtype": dtype,
                        "ranks": ranks,
                        "pools": pools,
                        "tensor_parallel": 2 if extra == layers else 1,
                        "largest_difference": round(worst, 6),
                        "ok": worst < TOLERANCE[dtype],
                        "seconds": round(time.perf_counter() - start, 1),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def half_billion(folder: Path) -> str:
    """A random model of the shape of Qwen2.5-0.5B, but with the tiny tokenizer's vocabulary kept at full width."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from examples.quickstart.tiny_model import tiny_model

    tiny = tiny_model("qwen2", folder / "tokenizer", seed=0)
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
    Qwen2ForCausalLM(config).save_pretrained(folder / "half")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "half")
    return str(folder / "half")


def memory(folder: Path, gpus: int) -> list[dict]:
    model = half_billion(folder)
    rows = [json.dumps({"prompt": f"What is {i} plus {i + 1}?", "answer": str(2 * i + 1)}) for i in range(64)]
    (folder / "sums.jsonl").write_text("\n".join(rows) + "\n")
    base = [
        "algorithm.name=grpo",
        "actor_rollout_ref.actor.use_kl_loss=false",
        f"data.train_files={folder / 'sums.jsonl'}",
        "data.train_batch_size=16",
        "data.max_response_length=64",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "reward.reward_function=accuracy_reward",
        f"trainer.default_local_dir={folder / 'half_run'}",
        "trainer.total_training_steps=2",
        "trainer.logger=[jsonl]",
    ]
    variants = [
        (1, "whole", []),
        (2, "sharded", []),
        (4, "sharded", []),
        (2, "offload_policy", [f"{FSDP}.offload_policy=true"]),
        (2, "tensor parallel", [f"{FSDP}.tensor_parallel_size=2"]),
        (4, "sharded, tensor parallel 2", [f"{FSDP}.tensor_parallel_size=2"]),
    ]
    found = []
    for ranks, name, extra in variants:
        if ranks > gpus:
            continue
        try:
            last = run([*base, f"trainer.n_gpus_per_node={ranks}", *extra])[-1]
        except Exception:
            traceback.print_exc()
            found.append({"test": "memory", "ranks": ranks, "variant": name, "ok": False})
            continue
        found.append(
            {
                "test": "memory",
                "model": "Qwen2.5-0.5B shape, random weights",
                "ranks": ranks,
                "variant": name,
                "peak_gib_per_gpu": round(last["perf/max_memory_allocated_gb"], 2),
                "seconds_per_step": round(last["timing_s/step"], 2),
                "logprob_gap_mean": round(last["rollout/logprob_gap_mean"], 5),
                "ok": True,
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "executors_gpu.json")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tiny").mkdir()
        rows = golden(Path(folder), gpus) + memory(Path(folder), gpus)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    record = {
        "command": "python tests/gpu/run_executors.py",
        "gpus": driver.stdout.strip().splitlines(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "tolerance": TOLERANCE,
        "results": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{k}={v}" for k, v in row.items()))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
