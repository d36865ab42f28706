#!/usr/bin/env bash
# The problems, then examples/tools/run_calculator_smollm2.sh: a warm-up with SFT, and GRPO with the calculator.
source "$(dirname "$0")/../common.sh"
"$PYTHON" "$RECIPES/../tools/word_problems.py" --out "$DATA"
export PYTHON MODEL DATA OUT
bash "$RECIPES/../tools/run_calculator_smollm2.sh" trainer.seed="$SEED" trainer.total_training_steps=20 "$@" ${RL:-} ${ALL:-}
