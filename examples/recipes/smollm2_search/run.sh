#!/usr/bin/env bash
# A warm-up with SFT on 40 chats, most of which guess, then GRPO with the search tool.
source "$(dirname "$0")/../common.sh"
"$PYTHON" "$RECIPES/tasks.py" search --out "$DATA"
verl sft --config "$HERE/sft.yaml" data.train_files="$DATA/sft.jsonl" model.path="$MODEL" \
    trainer.default_local_dir="$OUT/sft" trainer.seed="$SEED"
rl "$(ls -d "$OUT"/sft/global_step_*/actor/huggingface)" "$OUT/grpo" \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$RECIPES/../tools/search_tool.yaml" "$@"
