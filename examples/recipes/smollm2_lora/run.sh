#!/usr/bin/env bash
# GRPO on sums of two numbers: all weights, or LoRA with the settings of the README.
source "$(dirname "$0")/../common.sh"
"$PYTHON" "$RECIPES/../quickstart/arithmetic.py" --out "$DATA"
REWARD=$RECIPES/../quickstart/arithmetic.py
rl "$MODEL" "$OUT/grpo" "$@"
