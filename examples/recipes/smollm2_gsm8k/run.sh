#!/usr/bin/env bash
# SFT on the training solutions (SFT: its settings; "none" leaves it out), then GRPO on the same questions.
# GSM8K: a folder with train.jsonl and test.jsonl; without it, the data come from the Hugging Face Hub.
source "$(dirname "$0")/../common.sh"
"$PYTHON" "$RECIPES/../data_preprocess/gsm8k.py" ${GSM8K:+--local_dir "$GSM8K"} --save_dir "$DATA"
START=$MODEL
if [ "${SFT:-}" != none ]; then
    verl sft --config "$HERE/sft.yaml" data.train_files="$DATA/train.parquet" model.path="$MODEL" \
        trainer.default_local_dir="$OUT/sft" trainer.seed="$SEED" ${SFT:-}
    START=$(ls -d "$OUT"/sft/global_step_*/actor/huggingface)
fi
verl train --config "$HERE/config.yaml" data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$START" trainer.default_local_dir="$OUT/grpo" trainer.seed="$SEED" "$@" ${RL:-}
