#!/usr/bin/env bash
# One host: torchrun starts a process per GPU.
#
#   bash examples/launch/torchrun.sh [key=value ...]
#
# `verl train` alone does the same; use torchrun where a platform starts programs with it. Several hosts need Ray.
set -euo pipefail
CONFIG=${CONFIG:-examples/recipes/qwen2_5_7b_math/config.yaml}
GPUS=${GPUS:-8}

exec torchrun --standalone --nproc-per-node="$GPUS" -m verl.trainer.main_ppo --config "$CONFIG" \
    trainer.n_gpus_per_node="$GPUS" "$@"
