#!/usr/bin/env bash
# A warm-up of 20 steps of SFT on sorted lists; then pairs of a sorted list and one with two neighbors exchanged.
source "$(dirname "$0")/../common.sh"
"$PYTHON" "$RECIPES/tasks.py" sort --out "$DATA"
CONFIG=$RECIPES/smollm2_sft/rl.yaml
verl sft --config "$RECIPES/smollm2_sft/config.yaml" data.train_files="$DATA/sft.jsonl" model.path="$MODEL" \
    trainer.default_local_dir="$OUT/sft" trainer.seed="$SEED" trainer.total_training_steps=20 optim.lr=5e-5
WARM=$(ls -d "$OUT"/sft/global_step_*/actor/huggingface)
rl "$WARM" "$OUT/before" trainer.val_only=true
verl dpo --config "$HERE/config.yaml" data.train_files="$DATA/pairs.jsonl" data.val_files="$DATA/test_pairs.jsonl" \
    model.path="$WARM" trainer.default_local_dir="$OUT/dpo" trainer.seed="$SEED" "$@"
rl "$(ls -d "$OUT"/dpo/global_step_*/actor/huggingface)" "$OUT/after" trainer.val_only=true
