#!/bin/bash
# `rollout.name=sglang` on one GPU, in bfloat16 and without CUDA graphs, in 6 minutes, 15 at most (kernels are compiled):
# the contract of rollout engines, two GRPO steps at the shape of Qwen2.5-0.5B with random weights, two steps
# with LoRA, pushes, and the contract in the second model family with the seeds of SGLang's deterministic mode.
# The parts that say most come first.
# Results go to $1 (a folder): a log per part, and results.json with versions, GPU and a row per part. $2: attention
# backend (default: triton, which needs no kernels of SGLang's own).
#
#     tests/gpu/run_sglang.sh results
cd "$(dirname "$0")/../.."
. tests/gpu/parts.sh
backend=${2:-triton}
export VERL_CONTRACT_DEVICE=cuda VERL_CONTRACT_ENGINES=sglang VERL_CONTRACT_DTYPE=bf16
plain="{\"attention_backend\": \"$backend\", \"sampling_backend\": \"pytorch\"}"
seeded="{\"attention_backend\": \"$backend\", \"enable_deterministic_inference\": true}"
options="-q --tb=short --import-mode=importlib -p no:cacheprovider -o addopts= -ra"
kwargs=actor_rollout_ref.rollout.engine_kwargs.sglang

nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader | tee "$out/gpu.txt"
python3 -c 'import pathlib, sys; sys.path.insert(0, "."); from tests.gpu.run_executors import prepare; prepare(pathlib.Path(sys.argv[1]))' "$(realpath "$out")" &
preparing=$!

# SGLang sizes its cache by the free memory before and after loading, so that only one engine may start on a GPU at a time
VERL_CONTRACT_KWARGS=$plain part 150 contract-qwen2 python3 -m pytest $options tests/rollout/test_engine_contract.py -k sglang-qwen2
wait $preparing
steps() { # name, further settings
    local name=$1
    shift
    part 90 "$name" python3 -m verl.trainer.main_ppo algorithm.name=grpo data.train_files="$out/sums.jsonl" \
        data.train_batch_size=16 data.max_prompt_length=64 data.max_response_length=128 \
        actor_rollout_ref.model.path="$out/half" actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=4 \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.rollout.dtype=bf16 \
        actor_rollout_ref.rollout.enforce_eager=true $kwargs.attention_backend="$backend" \
        $kwargs.sampling_backend=pytorch actor_rollout_ref.actor.ppo_mini_batch_size=16 \
        reward.reward_function=accuracy_reward trainer.default_local_dir="$out/run-$name" trainer.total_training_steps=2 \
        trainer.val_before_train=false trainer.save_at_end=false trainer.resume_mode=disable "$@"
}
steps steps
steps lora actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.actor.optim.lr=1e-3
VERL_CONTRACT_KWARGS=$plain part 300 pushes python3 -m pytest $options tests/rollout/test_sglang.py -k "scheduler_did_not_load or two_steps"
VERL_CONTRACT_KWARGS=$seeded part 200 contract-llama python3 -m pytest $options tests/rollout/test_engine_contract.py -k sglang-llama

echo "=== all parts"
python3 - "$out" "${codes[@]}" <<'END' | tee "$out/results.json"
import importlib.metadata, json, re, sys
from pathlib import Path

out, codes = Path(sys.argv[1]), sys.argv[2:]
rows = []
for code in codes:
    name, exit_status, seconds = re.fullmatch(r"(.+): exit (\d+), (\d+) s", code).groups()
    lines = (out / f"{name}.log").read_text().splitlines()
    outcomes = [line for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    failed = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    rows.append({"part": name, "exit": int(exit_status), "seconds": int(seconds), "tests": outcomes[-1:], "failed": failed})


def steps(name):
    metrics = out / f"run-{name}" / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


versions = {name: importlib.metadata.version(name) for name in ("sglang", "torch", "transformers")}
found = {
    "gpu": (out / "gpu.txt").read_text().splitlines(),
    "dtype": "bf16",
    "versions": versions,
    "parts": rows,
    "steps": steps("steps"),
    "lora": steps("lora"),
}
print(json.dumps(found, indent=1))
END
