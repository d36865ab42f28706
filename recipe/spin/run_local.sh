#!/usr/bin/env bash
# SPIN in one process: 64 prompts in every step, each with a response of the data (column `response`) and one of the policy.
#
#   MODEL=/path/to/model DATA=data/sft bash verl/recipe/spin/run_local.sh [key=value ...]
#
# Any key may be set at the end of the line: `trainer.total_training_steps=5 data.train_batch_size=16`.
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}

exec "${PYTHON:-python}" -m verl.recipe.spin.main_spin \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    trainer.project_name=spin \
    trainer.experiment_name=local \
    trainer.logger='["console","jsonl"]' \
    trainer.total_epochs=1 \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    "$@"
