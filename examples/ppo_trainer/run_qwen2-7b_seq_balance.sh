#!/usr/bin/env bash
# PPO with a 7B model on one host of 8 GPUs, with packed sequences and work balanced by tokens.
#
#   python examples/data_preprocess/gsm8k.py --local_dir FOLDER_WITH_JSONL --save_dir data/gsm8k
#   MODEL=Qwen/Qwen2-7B-Instruct DATA=data/gsm8k bash examples/ppo_trainer/run_qwen2-7b_seq_balance.sh [key=value ...]
#
# Responses differ in length. Three settings balance the work:
#   use_remove_padding    sequences are packed: no computation on padding
#   use_dynamic_bsz       a micro-batch is filled up to a number of tokens instead of a number of samples
#
# N_GPUS is the number of processes. Two steps with a tiny random model on a CPU:
#
#   python examples/quickstart/make_tiny_model.py --like qwen2 --out data/tiny
#   N_GPUS=1 MODEL=data/tiny DATA=data/gsm8k bash examples/ppo_trainer/run_qwen2-7b_seq_balance.sh \
#       data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=8 data.max_response_length=32 \
#       data.val_max_samples=64 trainer.total_training_steps=2
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}
N_GPUS=${N_GPUS:-8}

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="['$DATA/train.parquet']" \
    data.val_files="['$DATA/test.parquet']" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576 \
    critic.model.path="$MODEL" \
    critic.model.use_remove_padding=true \
    critic.model.enable_gradient_checkpointing=true \
    critic.optim.lr=1e-5 \
    critic.use_dynamic_bsz=true \
    critic.ppo_max_token_len_per_gpu=24576 \
    critic.forward_max_token_len_per_gpu=98304 \
    trainer.n_gpus_per_node="$N_GPUS" \
    trainer.project_name=gsm8k \
    trainer.experiment_name=ppo_qwen2-7b_seq_balance \
    trainer.logger='["console","jsonl"]' \
    trainer.total_epochs=15 \
    trainer.test_freq=5 \
    trainer.save_freq=20 \
    "$@"
