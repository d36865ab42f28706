#!/bin/bash
# `rollout.name=sglang` on a machine with a GPU, in 3 minutes (two GPUs) or 6: the contract of rollout engines in float32, with
# the seeds of SGLang's deterministic mode in the second model family, pushes, and two GRPO steps at the shape of
# Qwen2.5-0.5B with random weights. Results go to $1 (a folder). $2: attention backend (default: triton, which needs no
# kernels of SGLang's own).
#
#     tests/gpu/run_sglang.sh results
cd "$(dirname "$0")/../.."
. tests/gpu/parts.sh
backend=${2:-triton}
export VERL_CONTRACT_DEVICE=cuda VERL_CONTRACT_ENGINES=sglang
plain="{\"attention_backend\": \"$backend\", \"sampling_backend\": \"pytorch\"}"
seeded="{\"attention_backend\": \"$backend\", \"enable_deterministic_inference\": true}"
options="-q --tb=short --import-mode=importlib -p no:cacheprovider -o addopts= -ra"
kwargs=actor_rollout_ref.rollout.engine_kwargs.sglang

nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
python3 -c 'import sglang, torch, transformers; print("sglang", sglang.__version__, "torch", torch.__version__, "transformers", transformers.__version__)'
python3 -c 'import pathlib, sys; sys.path.insert(0, "."); from tests.gpu.run_executors import prepare; prepare(pathlib.Path(sys.argv[1]))' "$(realpath "$out")" &

# SGLang sizes its cache by the free memory before and after loading, so that only one engine may start on a GPU at a time
seeded() {
    VERL_CONTRACT_KWARGS=$seeded part 150 contract-llama python3 -m pytest $options tests/rollout/test_engine_contract.py -k sglang-llama
    VERL_CONTRACT_KWARGS=$plain part 150 pushes python3 -m pytest $options tests/rollout/test_sglang.py -k "scheduler_did_not_load or two_steps"
}
plain() {
    VERL_CONTRACT_KWARGS=$plain part 150 contract-qwen2 python3 -m pytest $options tests/rollout/test_engine_contract.py -k sglang-qwen2
    part 120 steps python3 -m verl.trainer.main_ppo algorithm.name=grpo data.train_files="$out/sums.jsonl" data.train_batch_size=16 \
        data.max_prompt_length=64 data.max_response_length=128 actor_rollout_ref.model.path="$out/half" \
        actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
        $kwargs.attention_backend="$backend" $kwargs.sampling_backend=pytorch actor_rollout_ref.actor.ppo_mini_batch_size=16 \
        reward.reward_function=accuracy_reward trainer.default_local_dir="$out/run" trainer.total_training_steps=2 \
        trainer.val_before_train=false trainer.save_freq=-1 trainer.resume_mode=disable
}
if [ "$(python3 -c "import torch; print(torch.cuda.device_count())")" -gt 1 ]; then
    (CUDA_VISIBLE_DEVICES=1 seeded; printf '%s\n' "${codes[@]}" >"$out/codes.txt") >"$out/seeded.txt" 2>&1 &
    CUDA_VISIBLE_DEVICES=0 plain
    wait
    cat "$out/seeded.txt"
    mapfile -t -O "${#codes[@]}" codes <"$out/codes.txt"
else
    plain
    seeded
fi
echo "=== all parts"
grep -h " passed\| failed\| error" "$out"/*.log
printf '%s\n' "${codes[@]}"
