#!/usr/bin/env bash
# One host, or several: torchrun starts a process per GPU.
#
#   bash examples/launch/torchrun.sh [key=value ...]
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash examples/launch/torchrun.sh    # on each host, with its own NODE_RANK
#
# On one host, `verl train` alone does the same; use torchrun where a platform starts programs with it.
set -euo pipefail
CONFIG=${CONFIG:-examples/recipes/qwen2_5_7b_math/config.yaml}
GPUS=${GPUS:-8}

exec torchrun --nnodes="${NNODES:-1}" --node-rank="${NODE_RANK:-0}" --master-addr="${MASTER_ADDR:-localhost}" \
    --master-port="${MASTER_PORT:-29500}" --nproc-per-node="$GPUS" -m verl.trainer.main_ppo --config "$CONFIG" \
    trainer.nnodes="${NNODES:-1}" trainer.n_gpus_per_node="$GPUS" "$@"
