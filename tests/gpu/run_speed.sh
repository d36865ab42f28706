#!/bin/bash
# How fast a start, a step and a save are, at size. Random weights in the shape of Qwen2.5 are made here. Results go to $1.
#
#     tests/gpu/run_speed.sh results          # two GPUs, about nine minutes; with one GPU another four
#     ONLY="bf16 fp8" tests/gpu/run_speed.sh results
cd "$(dirname "$0")/../.."
. tests/gpu/parts.sh
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
work=$(mktemp -d)
actor=actor_rollout_ref.actor
# the placement of `verl plan --gpus 2 --gpu H100 --model 7B`: the reference waits on the host; 8-bit moments leave room
# for a rollout with the weights of the whole model on each GPU, which FP8 needs
seven="--suite gpu-7b-long --devices 2 --folder $work/7b --steps 4 --memory 0.5 --tokens 8192 --out $out/start.json
    --set $actor.use_kl_loss=true --set $actor.kl_loss_coef=0.001 --set actor_rollout_ref.ref.fsdp_config.param_offload=true
    --set $actor.optim.optimizer=AdamW8bit"

nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
if ((gpus > 1)); then
    part 240 bf16 python3 benchmarks/start.py $seven --label bf16 --save --limit 230
    part 140 fp8 python3 benchmarks/start.py $seven --label fp8 --set actor_rollout_ref.model.quantization=fp8 --limit 130
    part 170 long python3 benchmarks/start.py --suite gpu-long --devices 2 --folder "$work/long" --steps 1 --label ulysses \
        --set $actor.use_kl_loss=false --set $actor.fsdp_config.ulysses_sequence_parallel_size=2 --tokens 34000 \
        --memory 0.5 --out "$out/start.json" --limit 165
else
    part 50 decode256 python3 benchmarks/rollout.py --engines native --shape 0.5B --rows 256 --prompt 128 --new 256
    part 60 decode1024 python3 benchmarks/rollout.py --engines native --shape 0.5B --rows 1024 --prompt 128 --new 512
    part 110 step python3 benchmarks/grpo_step.py --against "" --betas 0.04 --steps 5 --out "$out/grpo_step.json"
    part 60 start python3 benchmarks/start.py --suite gpu --devices 1 --folder "$work/half" --steps 3 --label 0.5B \
        --set $actor.use_kl_loss=true --out "$out/start.json" --limit 60
fi
nvidia-smi --query-gpu=memory.used --format=csv,noheader
printf '%s\n' "${codes[@]}"
