#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to use the calculator, on one GPU.
#
#   python examples/tools/gsm8k_rows.py --out ~/data/calculator
#   MODEL=~/models/SmolLM2-135M-Instruct DATA=~/data/calculator bash examples/tools/run_calculator_smollm2.sh
#
# Further arguments are configuration keys, such as algorithm.shuffle_rewards=true for the control.
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model with tool calls in its chat template: a folder or an id}
DATA=${DATA:?set DATA to the folder with train.parquet and test.parquet}
HERE=$(cd "$(dirname "$0")" && pwd)

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    algorithm.name=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=320 \
    data.max_response_length=192 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=false \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.enable=true \
    actor_rollout_ref.rollout.multi_turn.format=hermes \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    actor_rollout_ref.rollout.multi_turn.tool_timeout=5 \
    actor_rollout_ref.rollout.multi_turn.function_tool_path="$HERE/calculator.py" \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    reward.custom_reward_function.path="$HERE/calculator.py" \
    trainer.total_training_steps=100 \
    trainer.test_freq=20 \
    trainer.save_at_end=false \
    trainer.logger='[console,jsonl]' \
    trainer.default_local_dir=outputs/tools/calculator_smollm2 \
    "$@"
