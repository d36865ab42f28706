#!/usr/bin/env bash
# A warm-up of 15 steps of SFT, then GRPO. Without the warm-up, GRPO learns to copy the numbers, and not to sort them.
source "$(dirname "$0")/../common.sh"
"$PYTHON" "$RECIPES/tasks.py" sort --out "$DATA"
verl sft --config "$RECIPES/smollm2_sft/config.yaml" data.train_files="$DATA/sft.jsonl" model.path="$MODEL" \
    trainer.default_local_dir="$OUT/sft" trainer.seed="$SEED" trainer.total_training_steps=15 optim.lr=5e-5
rl "$(ls -d "$OUT"/sft/global_step_*/actor/huggingface)" "$OUT/grpo" "$@"
