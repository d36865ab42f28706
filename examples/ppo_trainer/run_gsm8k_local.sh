#!/usr/bin/env bash
# PPO on GSM8K in one process: a critic of the same size as the policy provides the values for GAE.
#
#   python examples/data_preprocess/gsm8k.py --local_dir FOLDER_WITH_JSONL --save_dir data/gsm8k
#   MODEL=/path/to/model DATA=data/gsm8k bash examples/ppo_trainer/run_gsm8k_local.sh [key=value ...]
#
# Append any config key. Two steps with a tiny random model, one minute on a laptop:
#
#   python examples/quickstart/make_tiny_model.py --like qwen2 --out data/tiny
#   MODEL=data/tiny DATA=data/gsm8k bash examples/ppo_trainer/run_gsm8k_local.sh \
#       data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=8 data.max_response_length=32 \
#       data.val_max_samples=64 trainer.total_training_steps=2
#
# The same command with trainer.total_training_steps=3 resumes from the checkpoint of step 2.
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
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
    critic.model.path="$MODEL" \
    critic.optim.lr=1e-5 \
    trainer.project_name=gsm8k \
    trainer.experiment_name=ppo_local \
    trainer.logger='["console","jsonl"]' \
    trainer.total_epochs=1 \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    "$@"
