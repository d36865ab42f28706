# Read by the run scripts of the recipes of SmolLM2-135M-Instruct. They take settings of their last stage, and these
# variables: MODEL (default: looked for by quickstart/smollm2.py), OUT, SEED, PYTHON; settings of every stage: ALL, and of
# every stage of GRPO, validations included: RL.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
RECIPES=$(dirname "$HERE")
PYTHON=${PYTHON:-python}
SEED=${SEED:-1}
OUT=${OUT:-outputs/$(basename "$HERE")}
DATA=${DATA:-$OUT/data}
MODEL=${MODEL:-$("$PYTHON" "$RECIPES/../quickstart/smollm2.py")}

verl() { "$PYTHON" -m verl "$@" ${ALL:-}; }

# rl MODEL FOLDER [SETTING ...]: training, or validation, with the data in DATA
rl() {
    local model=$1 folder=$2
    shift 2
    verl train --config "$CONFIG" data.train_files="$DATA/train.jsonl" data.val_files="$DATA/test.jsonl" \
        actor_rollout_ref.model.path="$model" reward.custom_reward_function.path="$REWARD" \
        trainer.default_local_dir="$folder" trainer.seed="$SEED" "$@" ${RL:-}
}
CONFIG=$HERE/config.yaml
REWARD=$RECIPES/tasks.py
