#!/usr/bin/env bash
# A teacher by SFT on sorted lists; then its log-probs, and no reward, train the model on its own responses.
source "$(dirname "$0")/../common.sh"
"$PYTHON" "$RECIPES/tasks.py" sort --out "$DATA"
verl sft --config "$RECIPES/smollm2_sft/config.yaml" data.train_files="$DATA/sft.jsonl" model.path="$MODEL" \
    trainer.default_local_dir="$OUT/teacher" trainer.seed=1
TEACHER=$(ls -d "$OUT"/teacher/global_step_*/actor/huggingface)
rl "$MODEL" "$OUT/grpo" distillation.teacher_models.teacher.model_path="$TEACHER" "$@"
