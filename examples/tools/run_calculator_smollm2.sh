#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to solve word problems with the calculator, on one GPU: a warm-up with SFT, then GRPO.
#
#   python examples/tools/word_problems.py --out ~/data/calculator
#   MODEL=~/models/SmolLM2-135M-Instruct DATA=~/data/calculator bash examples/tools/run_calculator_smollm2.sh
#
# Without the warm-up, the model never calls the tool, so every reward is 0. The warm-up is short: 40 demonstrations, of
# which most have one operation. The model then calls the tool, often with a wrong expression, and GRPO improves it. The
# script prints the accuracy on the test problems before the warm-up, after it, and during GRPO.
#
# The chat template of SmolLM2 has no tools, and a warning says that it does not describe them to the policy. Ignore it
# here: the system message of the problems describes the calculator.
#
# Further arguments are configuration keys of GRPO. The control, with the same MODEL, DATA and warm-up:
#
#   WARM=outputs/tools/calculator_smollm2/warm_up/global_step_10/actor/huggingface \
#   OUT=outputs/tools/calculator_smollm2_shuffled \
#   bash examples/tools/run_calculator_smollm2.sh algorithm.shuffle_rewards=true
set -euo pipefail
MODEL=${MODEL:?set MODEL to SmolLM2-135M-Instruct: a folder or an id}
DATA=${DATA:?set DATA to the folder that word_problems.py wrote}
OUT=${OUT:-outputs/tools/calculator_smollm2}
WARM=${WARM:-} # a model that is warmed up already
PYTHON=${PYTHON:-python}
HERE=$(cd "$(dirname "$0")" && pwd)

grpo=(
    algorithm.name=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=64
    data.max_prompt_length=320
    data.max_response_length=192
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.actor.optim.lr=1e-5
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.multi_turn.enable=true
    actor_rollout_ref.rollout.multi_turn.format=hermes
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3
    actor_rollout_ref.rollout.multi_turn.tool_timeout=5
    actor_rollout_ref.rollout.multi_turn.function_tool_path="$HERE/calculator.py"
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    reward.custom_reward_function.path="$HERE/calculator.py"
    trainer.total_training_steps=100
    trainer.test_freq=20
    trainer.save_at_end=false
    trainer.logger='[console,jsonl]'
)

if [ -z "$WARM" ]; then
    "$PYTHON" -m verl.trainer.main_ppo "${grpo[@]}" \
        actor_rollout_ref.model.path="$MODEL" \
        trainer.val_only=true \
        trainer.default_local_dir="$OUT/start"

    "$PYTHON" -m verl.trainer.sft_trainer \
        model.path="$MODEL" \
        model.enable_gradient_checkpointing=false \
        data.train_files="$DATA/demonstrations.parquet" \
        data.train_batch_size=4 \
        data.max_length=512 \
        optim.lr=5e-5 \
        optim.lr_warmup_steps=3 \
        checkpoint.save_contents='[model]' \
        trainer.total_training_steps=10 \
        trainer.logger='[console,jsonl]' \
        trainer.default_local_dir="$OUT/warm_up"
    WARM=$OUT/warm_up/global_step_10/actor/huggingface
fi

"$PYTHON" -m verl.trainer.main_ppo "${grpo[@]}" \
    actor_rollout_ref.model.path="$WARM" \
    trainer.default_local_dir="$OUT/grpo" \
    "$@"

# before the warm-up: start, step 0; after it: grpo, step 0
for run in start grpo; do
    log=$OUT/$run/metrics.jsonl
    if [ -f "$log" ]; then # a control has no start
        sed -nE 's/.*"step": ([0-9]+).*"val-core\/calculator\/acc\/mean@1": ([0-9.]+).*/'$run', step \1: accuracy \2/p' "$log"
    fi
done
