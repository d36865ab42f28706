#!/usr/bin/env bash
# GRPO with a mixture of experts in one process, with router replay (R3). All commands take about two minutes.
#
#   python examples/quickstart/make_tiny_model.py --like mixtral --out data/tiny-moe
#   python examples/quickstart/tasks.py reverse --out data/reverse --rows 4096
#   verl sft model.path=data/tiny-moe data.train_files=data/reverse/sft.parquet data.train_batch_size=64 \
#       data.max_length=32 optim.lr=2e-3 trainer.total_training_steps=80 trainer.default_local_dir=data/moe-sft
#   MODEL=data/moe-sft/global_step_80/actor/huggingface DATA=data/reverse \
#       bash examples/grpo_trainer/run_tiny_moe_local.sh [key=value ...]
#
# Append any config key. moe/routing_mismatch is the share of the tokens for which the router of training chooses other
# experts than the rollout did. With two processes, each holds half of the experts:
#
#   ... run_tiny_moe_local.sh trainer.n_gpus_per_node=2 actor_rollout_ref.actor.fsdp_config.expert_parallel_size=2
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model, a mixture of experts}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}
HERE=$(cd "$(dirname "$0")/../.." && pwd)

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=32 \
    data.max_prompt_length=16 \
    data.max_response_length=8 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=5e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.router_replay.mode=R3 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.enable_rollout_routing_replay=true \
    reward.custom_reward_function.path="$HERE/examples/quickstart/tasks.py" \
    trainer.project_name=tiny \
    trainer.experiment_name=moe_local \
    trainer.logger='["console","jsonl"]' \
    trainer.total_training_steps=30 \
    trainer.test_freq=30 \
    "$@"
