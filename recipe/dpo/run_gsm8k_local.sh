#!/usr/bin/env bash
# Online DPO on GSM8K in one process: of two responses to a prompt the better one is preferred.
#
#   python examples/data_preprocess/gsm8k.py --local_dir FOLDER_WITH_JSONL --save_dir data/gsm8k
#   MODEL=/path/to/model DATA=data/gsm8k bash verl/recipe/dpo/run_gsm8k_local.sh [key=value ...]
#
# Any key may be set at the end of the line: `trainer.total_training_steps=5 data.train_batch_size=16`.
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}

exec "${PYTHON:-python}" -m verl.recipe.dpo.main_dpo --online \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    trainer.project_name=gsm8k \
    trainer.experiment_name=dpo_local \
    trainer.logger='["console","jsonl"]' \
    trainer.total_epochs=1 \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    "$@"
