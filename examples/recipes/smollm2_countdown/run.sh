#!/usr/bin/env bash
# The data, then GRPO.
source "$(dirname "$0")/../common.sh"
"$PYTHON" "$RECIPES/tasks.py" countdown --out "$DATA"
rl "$MODEL" "$OUT/grpo" "$@"
