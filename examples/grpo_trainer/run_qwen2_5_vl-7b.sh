#!/usr/bin/env bash
# GRPO with Qwen2.5-VL-7B on Geometry3K: problems with an image, on one host of 8 GPUs.
#
#   pip install -e '.[vlm,hub]'
#   python examples/data_preprocess/geo3k.py --hub hiyouga/geometry3k --save_dir data/geo3k
#   MODEL=Qwen/Qwen2.5-VL-7B-Instruct DATA=data/geo3k bash examples/grpo_trainer/run_qwen2_5_vl-7b.sh [key=value ...]
#
# N_GPUS is the number of processes. rollout.name=vllm at the end of the line selects another engine.
# data.max_pixels limits the tokens of an image: Qwen2.5-VL has one for 28 x 28 pixels. Two steps with a tiny model on
# a CPU:
#
#   python examples/quickstart/make_tiny_vl_model.py --out data/tiny-vl
#   python examples/data_preprocess/count_shapes.py --save_dir data/shapes
#   N_GPUS=1 MODEL=data/tiny-vl DATA=data/shapes bash examples/grpo_trainer/run_qwen2_5_vl-7b.sh \
#       data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=4 data.max_response_length=8 \
#       data.val_max_samples=32 trainer.total_training_steps=2 reward.reward_function=accuracy_reward
set -euo pipefail
MODEL=${MODEL:?set MODEL to a vision-language model: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}
N_GPUS=${N_GPUS:-8}

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=512 \
    data.val_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.max_pixels=401408 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.n=5 \
    trainer.n_gpus_per_node="$N_GPUS" \
    trainer.project_name=geo3k \
    trainer.experiment_name=qwen2_5_vl_7b \
    trainer.logger='["console","jsonl"]' \
    trainer.total_epochs=15 \
    trainer.test_freq=5 \
    trainer.save_freq=20 \
    "$@"
