"""GRPO with LoRA against QLoRA on one GPU: memory, and time of a step.

    python benchmarks/lora.py --out FILE.json     # random weights of Qwen2.5-7B

Runs GRPO in bf16 with LoRA of rank 32, and with QLoRA (NF4) in a process that may allocate 24 GiB.
`planned_gib` is the prediction of `verl plan`, `peak_gib` what torch allocated; seconds are medians after the first
step. Each run is a separate process. Needs peft and bitsandbytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.grpo_step import SUITES, even_digits, make_inputs, task_overrides

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
GIB = 2**30
LORA = [f"{MODEL}lora_rank=32", f"{MODEL}lora_alpha=64", f"{ACTOR}optim.weight_decay=0", "algorithm.adv_estimator=grpo"]
QLORA = [*LORA, f"{MODEL}quantization=nf4"]
#: fixed, so that the settings do not depend on the memory that a run may use
SIZES = [f"{ACTOR}ppo_max_token_len_per_gpu=4096", f"{ACTOR}use_dynamic_bsz=true"]
SIZES += [f"{MODEL}enable_gradient_checkpointing=true", f"{ROLLOUT}gpu_memory_utilization=0.15"]
SIZES += [
    f"{ROLLOUT}max_num_seqs=64",
    f"{ROLLOUT}log_prob_use_dynamic_bsz=true",
    f"{ROLLOUT}log_prob_max_token_len_per_gpu=4096",
]
#: name -> (settings, GiB that the process may use)
MEMORY_RUNS = {"LoRA": (LORA, 0), "QLoRA": (QLORA, 24)}
STEPS = 3


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return even_digits(solution_str)


def planned_gib(overrides: list[str]) -> float:
    """The largest phase by `verl plan`, on this GPU."""
    from verl.config import load_config
    from verl.trainer.checks.planning import estimate
    from verl.trainer.startup.roles import roles_of

    config = load_config(overrides=overrides)
    return estimate(config, roles_of(config)).peak / GIB


def train(overrides: list[str], limit_gib: float) -> dict[str, Any]:
    """One run in this process: the metrics of all steps."""
    import torch

    from verl.trainer.local_trainer import LocalPPOTrainer

    if limit_gib and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_gib * GIB / total)
    LocalPPOTrainer(overrides=overrides).fit()
    folder = next(o.partition("=")[2] for o in overrides if o.startswith("trainer.default_local_dir="))
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    return {"steps": [json.loads(line) for line in lines], "peak_gib": peak}


def in_process(overrides: list[str], limit_gib: float = 0) -> dict[str, Any]:
    """`train` in a separate process. Raises RuntimeError with the end of its output if it fails."""
    command = [sys.executable, __file__, "run", json.dumps([overrides, limit_gib])]
    env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # weights come and go in every step
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def common(folder: Path, steps: int) -> list[str]:
    return [
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}",
        "trainer.logger=[jsonl]",
        "trainer.save_freq=-1",
        "trainer.n_gpus_per_node=1",
    ]


def column(steps: list[dict], name: str) -> list[float]:
    return [line[name] for line in steps if name in line]


def measure_memory(suite: str) -> list[dict[str, Any]]:
    work, lines = SUITES[suite], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_inputs(work, folder, work.prompts * STEPS)
        for i, (name, (settings, limit)) in enumerate(MEMORY_RUNS.items()):
            overrides = [*task_overrides(work, folder), *settings, *SIZES, *common(folder / str(i), STEPS)]
            overrides += [f"{ACTOR}ppo_mini_batch_size={work.prompts}", f"{ACTOR}optim.lr=1e-5"]
            try:
                result = in_process(overrides, limit)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                lines.append({"run": name, "limit_gib": limit, "error": str(error)[-300:]})
                continue
            seconds = column(result["steps"], "timing_s/step")[1:]
            line = {"run": name, "limit_gib": limit, "planned_gib": round(planned_gib(overrides), 2)}
            line |= {"peak_gib": round(result["peak_gib"], 2), "seconds": round(statistics.median(seconds), 2)}
            for part in ("gen", "old_log_prob", "update_actor", "sync_weights"):
                values = column(result["steps"], f"timing_s/{part}")[1:]
                line |= {f"{part}_seconds": round(statistics.median(values), 2)} if values else {}
            line["mismatch"] = max(column(result["steps"], "rollout/logprob_gap_mean"))
            print(json.dumps(line), flush=True)
            lines.append(line)
    return lines


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        print("\n" + json.dumps(train(*json.loads(sys.argv[2]))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="gpu-7b", help="shape of the model and the batch")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    lines = measure_memory(args.suite)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record = {"command": f"python benchmarks/lora.py {' '.join(sys.argv[1:])}", "device": device, "lines": lines}
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(any("error" in line for line in lines))


if __name__ == "__main__":
    main()
