#!/usr/bin/env bash
# SFT on sorted lists, between two validations.
source "$(dirname "$0")/../common.sh"
"$PYTHON" "$RECIPES/tasks.py" sort --out "$DATA"
CONFIG=$RECIPES/smollm2_sft/rl.yaml
rl "$MODEL" "$OUT/before" trainer.val_only=true
verl sft --config "$HERE/config.yaml" data.train_files="$DATA/sft.jsonl" model.path="$MODEL" \
    trainer.default_local_dir="$OUT/sft" trainer.seed="$SEED" "$@"
rl "$(ls -d "$OUT"/sft/global_step_*/actor/huggingface)" "$OUT/after" trainer.val_only=true
