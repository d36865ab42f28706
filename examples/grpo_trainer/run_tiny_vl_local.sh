#!/usr/bin/env bash
# GRPO on images in two to three minutes on a CPU: a tiny Qwen2-VL model with random weights learns to count shapes.
#
#   bash examples/grpo_trainer/run_tiny_vl_local.sh [key=value ...]
#   CONTROL=shuffled bash examples/grpo_trainer/run_tiny_vl_local.sh      # every prompt gets the image of another
#   CONTROL=blank bash examples/grpo_trainer/run_tiny_vl_local.sh         # every image is white
#
# SFT_STEPS steps of SFT teach the form of a response and a little counting; GRPO then learns from the reward alone. The
# last lines are the test accuracy before and after. In a control, the images of GRPO have no information, so the
# accuracy goes to that of guessing, 1/4. The keys at the end of the line are those of GRPO, and replace those below.
# The runs are written to the folder OUT. An interrupted run is resumed, and a finished one is not repeated.
set -euo pipefail
OUT=${OUT:-outputs/tiny-vl}
CONTROL=${CONTROL:-none}
SFT_STEPS=${SFT_STEPS:-30}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python}

RUN="$OUT/grpo-$CONTROL"

if [ $# = 0 ] && [ -e "$RUN/global_step_40" ]; then
    echo "$RUN has a finished run: remove this folder, or set OUT=FOLDER to write to another one" >&2
    exit 1
fi

if [ ! -e "$OUT/sft/global_step_$SFT_STEPS" ]; then # the controls have the same model and SFT
    "$PYTHON" "$HERE/data_preprocess/count_shapes.py" --save_dir "$OUT/shapes"
    "$PYTHON" "$HERE/quickstart/make_tiny_vl_model.py" --out "$OUT/model"
    "$PYTHON" -m verl.trainer.sft_trainer \
        data.train_files="$OUT/shapes/train.parquet" \
        data.train_batch_size=64 \
        data.max_length=64 \
        model.path="$OUT/model" \
        optim.lr=2e-3 \
        trainer.default_local_dir="$OUT/sft" \
        trainer.logger='["console","jsonl"]' \
        trainer.total_training_steps="$SFT_STEPS"
fi

"$PYTHON" "$HERE/data_preprocess/count_shapes.py" --save_dir "$OUT/$CONTROL" --control "$CONTROL" --seed 1
settings=(
    algorithm.adv_estimator=grpo
    data.train_files="$OUT/$CONTROL/train.parquet"
    data.val_files="$OUT/$CONTROL/test.parquet"
    data.train_batch_size=32
    data.max_prompt_length=64
    data.max_response_length=4
    actor_rollout_ref.model.path="$OUT/sft/global_step_$SFT_STEPS/actor/huggingface"
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.optim.lr=1e-3
    reward.reward_function=accuracy_reward
    reward.isolation=none
    trainer.default_local_dir="$RUN"
    trainer.logger='["console","jsonl"]'
    trainer.log_val_generations=2
    trainer.total_training_steps=40
    trainer.test_freq=20
)
for given in "$@"; do # a key is given once
    for i in "${!settings[@]}"; do
        if [ "${settings[i]%%=*}" = "${given%%=*}" ]; then unset "settings[i]"; fi
    done
done
"$PYTHON" -m verl.trainer.main_ppo "${settings[@]}" "$@"

"$PYTHON" - "$RUN/metrics.jsonl" <<'PRINT'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
found = [(line["step"], value) for line in lines for name, value in line.items() if name.startswith("val-core/")]
(first, before), (last, after) = found[0], found[-1]
print(f"test accuracy: {before:.2f} before GRPO (step {first}), {after:.2f} after {last} steps")
PRINT
