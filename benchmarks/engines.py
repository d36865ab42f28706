"""A GRPO step with each rollout engine and placement, side by side: same model, prompts, reward and token counts.

    python benchmarks/engines.py                                       # two GPUs: 0.5B, native and vllm
    python benchmarks/engines.py --suite gpu-7b --engines native,vllm  # 7B, FSDP2 over both GPUs
    python benchmarks/engines.py --suite gpu-moe --engines native --strategies fsdp2,megatron  # training engines
    python benchmarks/engines.py --suite gpu-vl --devices 1 --placements colocated  # Qwen2.5-VL-3B, an image each
    python benchmarks/engines.py --suite cpu --engines native,hf       # any machine

Each line is one run of `verl.trainer.main_ppo`; the seconds of its operators are medians over the steps after the
warm-up. Placements:

- colocated: actor and rollout share all devices. The rollout is tensor-parallel with --tensor-parallel, and so is the
  training with `megatron`.
- split: the first half of the devices trains, the second half generates.

`mismatch` is the mean absolute difference of the log-probs of rollout and training, `push_gib_s` the bytes of one
weight push divided by its seconds.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grpo_step import SUITES, facts, make_inputs
from vision_inputs import VISION_SUITES, VisionWork, make_vision_inputs

ROOT = Path(__file__).resolve().parents[1]
ALL_SUITES = SUITES | VISION_SUITES
#: column of the table -> metric of the run
COLUMNS = {
    "step_s": "timing_s/step",
    "gen_s": "timing_s/gen",
    "old_log_prob_s": "timing_s/old_log_prob",
    "update_s": "timing_s/update_actor",
    "mfu": "perf/mfu/actor",
    "push_s": "weight_sync/seconds",
    "tokens_s": "rollout/tokens_per_second",
    "mismatch": "rollout/logprob_gap_mean",
    "routing_mismatch": "moe/routing_mismatch",
    "memory_gib": "perf/max_memory_allocated_gb",
}


def overrides(
    args: argparse.Namespace, folder: Path, strategy: str, engine: str, placement: str, replay: str = "disabled"
) -> list[str]:
    """The command line of one run. strategy: the training engine. replay: mode of router replay."""
    work, devices = ALL_SUITES[args.suite], args.devices
    settings = {
        "algorithm.name": "grpo",
        "data.train_files": folder / "prompts.jsonl",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt,
        "data.dataloader_num_workers": 0,  # as in the records
        "data.max_response_length": work.new,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.n": work.samples,
        "actor_rollout_ref.rollout.ignore_eos": "true",
        "actor_rollout_ref.rollout.gpu_memory_utilization": args.memory,
        "actor_rollout_ref.actor.strategy": strategy,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.use_dynamic_bsz": "true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": args.tokens,
        "actor_rollout_ref.actor.ppo_mini_batch_size": work.prompts,
        "reward.custom_reward_function.path": ROOT / "benchmarks" / "grpo_step.py",
        "trainer.total_training_steps": args.steps,
        "trainer.n_gpus_per_node": devices,
        "trainer.save_at_end": False,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": folder / f"{strategy}_{engine}_{placement}_{replay}",
    }
    if placement == "split":
        half = devices // 2
        settings["placement.actor_devices"] = json.dumps(list(range(half)))
        settings["placement.rollout_devices"] = json.dumps(list(range(half, devices)))
    elif args.tensor_parallel > 1:
        settings["actor_rollout_ref.rollout.tensor_model_parallel_size"] = args.tensor_parallel
    if strategy == "megatron" and placement == "colocated":
        settings["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"] = args.tensor_parallel
    if replay != "disabled":
        settings["actor_rollout_ref.actor.router_replay.mode"] = replay
        settings["actor_rollout_ref.rollout.enable_rollout_routing_replay"] = "true"
    further = work.settings if isinstance(work, VisionWork) else ()
    return [f"{key}={value}" for key, value in settings.items()] + [*further, *args.set]


def run(args: argparse.Namespace, folder: Path, strategy: str, engine: str, placement: str, replay: str) -> dict:
    """Run one configuration. Returns its line of the record."""
    start, settings = time.perf_counter(), overrides(args, folder, strategy, engine, placement, replay)
    name = next(text.rpartition("/")[2] for text in settings if text.startswith("trainer.default_local_dir="))
    out = folder / f"{name}.log"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with out.open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=log, env=environment, cwd=folder, timeout=args.limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"no end within {args.limit:g} s"
    line = {"strategy": strategy, "engine": engine, "placement": placement}
    line |= {"router_replay": replay} if replay != "disabled" else {}
    line["total_s"] = round(time.perf_counter() - start, 1)
    if code != 0:
        print(out.read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        return line | {"failed": code}
    metrics = folder / name / "metrics.jsonl"
    steps = [json.loads(text) for text in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [step for step in steps if "timing_s/step" in step][args.warm_up :]
    for name, metric in COLUMNS.items():
        values = [step[metric] for step in steps if metric in step]
        line[name] = float(f"{statistics.median(values):.4g}") if values else None
    if line["push_s"]:
        line["push_gib_s"] = round(steps[-1]["weight_sync/bytes"] / 2**30 / line["push_s"], 2)
    return line | {"steps": len(steps)}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=ALL_SUITES, default="gpu")
    parser.add_argument("--engines", default="native,vllm", help="names of rollout engines")
    parser.add_argument("--strategies", default="fsdp2", help="training engines: fsdp2, megatron")
    parser.add_argument("--skip", default="", help="pairs to skip, such as megatron/vllm")
    parser.add_argument("--router-replay", default="disabled", help="modes of router replay: disabled, R3")
    parser.add_argument("--placements", default="colocated,split")
    parser.add_argument("--devices", type=int, default=2, help="devices of a run")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of the colocated rollout")
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU memory for the rollout")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=5, help="steps of a run, including the warm-up")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="time limit of a run in seconds")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further override")
    parser.add_argument("--out", type=Path, help="also write the record to this file")
    return parser


def main() -> None:
    args = parser().parse_args()
    args.threads, args.trl_python = os.cpu_count(), sys.executable
    work = ALL_SUITES[args.suite]
    record = facts(args) | {"lines": []}
    record["command"] = " ".join(["python benchmarks/engines.py", *sys.argv[1:]])
    record["versions"] = record["versions"]["ours"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = make_vision_inputs if isinstance(work, VisionWork) else make_inputs
        make(work, folder, work.prompts * args.steps)
        choices = (args.placements, args.strategies, args.engines, args.router_replay)
        for placement, strategy, engine, replay in itertools.product(*(choice.split(",") for choice in choices)):
            if f"{strategy}/{engine}" in args.skip.split(","):
                continue
            record["lines"].append(run(args, folder, strategy, engine, placement, replay))
            print(json.dumps(record["lines"][-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
