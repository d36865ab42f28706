#!/usr/bin/env bash
# A model with 0.4M random parameters learns to use a tool by GRPO, on a CPU: multiply.py has the tool and the reward.
#
#   bash examples/tools/run_multiply.sh
#
# The warm-up leaves room: in half of its 1,000 chats the answer is a guess, so the model often guesses too, and copies
# numbers wrongly. GRPO repairs both from the reward alone. Further arguments are configuration keys of GRPO. The
# control, from the same warm-up:
#
#   WARM=outputs/tools/multiply/sft/global_step_160/actor/huggingface OUT=outputs/tools/multiply_shuffled \
#   bash examples/tools/run_multiply.sh algorithm.shuffle_rewards=true
set -euo pipefail
OUT=${OUT:-outputs/tools/multiply}
SEED=${SEED:-1}
WARM=${WARM:-} # a model that is warmed up already
PYTHON=${PYTHON:-python}
HERE=$(cd "$(dirname "$0")" && pwd)
export OMP_NUM_THREADS=1 # matrices this small do not benefit from more threads

"$PYTHON" "$HERE/multiply.py" --out "$OUT/data" --seed "$SEED"
if [ -z "$WARM" ]; then
    "$PYTHON" "$HERE/../quickstart/make_tiny_model.py" --like qwen2 --text "$OUT/data/texts.txt" --seed "$SEED" --out "$OUT/model"

    "$PYTHON" -m verl sft \
        model.path="$OUT/model" \
        data.train_files="$OUT/data/sft.jsonl" \
        data.train_batch_size=32 \
        data.max_length=128 \
        optim.lr=2e-3 \
        optim.lr_warmup_steps=20 \
        trainer.total_training_steps=160 \
        trainer.seed="$SEED" \
        trainer.default_local_dir="$OUT/sft"
    WARM=$OUT/sft/global_step_160/actor/huggingface
fi

"$PYTHON" -m verl train \
    algorithm.name=grpo \
    data.train_files="$OUT/data/train.jsonl" \
    data.val_files="$OUT/data/test.jsonl" \
    data.train_batch_size=16 \
    data.max_prompt_length=32 \
    data.max_response_length=96 \
    actor_rollout_ref.model.path="$WARM" \
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
    trainer.total_training_steps=40 \
    trainer.test_freq=10 \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$OUT/grpo" \
    "$@"
