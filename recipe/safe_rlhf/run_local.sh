#!/usr/bin/env bash
# Safe RLHF in one process: a reward model, a cost model, and a critic for each.
#
#   MODEL=... REWARD_MODEL=... COST_MODEL=... DATA=data/safe bash verl/recipe/safe_rlhf/run_local.sh [key=value ...]
#
# Any key may be set at the end of the line: `trainer.total_training_steps=5 data.train_batch_size=16`.
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model: a folder or an id}
REWARD_MODEL=${REWARD_MODEL:?set REWARD_MODEL to a sequence-classification model: a folder or an id}
COST_MODEL=${COST_MODEL:?set COST_MODEL to a sequence-classification model: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}

exec "${PYTHON:-python}" -m verl.recipe.safe_rlhf.main_safe_rlhf \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    reward.reward_model.enable=true \
    reward.reward_model.model_path="$REWARD_MODEL" \
    safe_rlhf.cost_model.enable=true \
    safe_rlhf.cost_model.model_path="$COST_MODEL" \
    trainer.project_name=safe_rlhf \
    trainer.experiment_name=local \
    trainer.logger='["console","jsonl"]' \
    trainer.total_epochs=1 \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    "$@"
