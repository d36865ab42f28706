#!/usr/bin/env bash
# ReMax on GSM8K in one process: the reward of the greedy response is the baseline; no critic, one response per prompt.
#
#   python examples/data_preprocess/gsm8k.py --local_dir FOLDER_WITH_JSONL --save_dir data/gsm8k
#   MODEL=/path/to/model DATA=data/gsm8k bash examples/remax_trainer/run_gsm8k_local.sh [key=value ...]
#
# Append any config key: `trainer.total_training_steps=5 data.train_batch_size=16`.
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=remax \
    algorithm.use_kl_in_reward=true \
    algorithm.kl_ctrl.kl_coef=0.001 \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=256 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    trainer.project_name=gsm8k \
    trainer.experiment_name=remax_local \
    trainer.logger='["console","jsonl"]' \
    trainer.total_epochs=1 \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    "$@"
