#!/usr/bin/env bash
# A model with 0.4M random parameters learns to use a tool by GRPO, on a CPU: multiply.py has the tool and the reward.
#
#   bash examples/tools/run_multiply.sh
#
# The warm-up stops early: 70 steps of SFT on 1,000 chats show the form of a call, but the model copies numbers wrongly
# in most of them. GRPO does the rest. Further arguments are configuration keys of GRPO; the control is
#
#   OUT=outputs/tools/multiply_shuffled bash examples/tools/run_multiply.sh algorithm.shuffle_rewards=true
set -euo pipefail
OUT=${OUT:-outputs/tools/multiply}
SEED=${SEED:-1}
PYTHON=${PYTHON:-python}
HERE=$(cd "$(dirname "$0")" && pwd)
export OMP_NUM_THREADS=1 # matrices this small do not benefit from more threads

"$PYTHON" "$HERE/multiply.py" --out "$OUT/data" --seed "$SEED"
"$PYTHON" "$HERE/../quickstart/make_tiny_model.py" --like qwen2 --text "$OUT/data/texts.txt" --seed "$SEED" --out "$OUT/model"

"$PYTHON" -m verl sft \
    model.path="$OUT/model" \
    data.train_files="$OUT/data/sft.jsonl" \
    data.train_batch_size=32 \
    data.max_length=128 \
    optim.lr=2e-3 \
    optim.lr_warmup_steps=20 \
    trainer.total_training_steps=70 \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$OUT/sft"

"$PYTHON" -m verl train \
    algorithm.name=grpo \
    data.train_files="$OUT/data/train.jsonl" \
    data.val_files="$OUT/data/test.jsonl" \
    data.train_batch_size=16 \
    data.max_prompt_length=32 \
    data.max_response_length=96 \
    actor_rollout_ref.model.path="$OUT/sft/global_step_70/actor/huggingface" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.enable=true \
    actor_rollout_ref.rollout.multi_turn.function_tool_path="$HERE/multiply.py" \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.actor.optim.lr=1e-3 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_kl_loss=false \
    reward.custom_reward_function.path="$HERE/multiply.py" \
    trainer.total_training_steps=60 \
    trainer.test_freq=20 \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$OUT/grpo" \
    "$@"
