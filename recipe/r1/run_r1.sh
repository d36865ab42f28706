#!/usr/bin/env bash
# Eight responses to every prompt, then accuracy and pass@k by data source.
#
#   MODEL=/path/to/model DATA=test.parquet OUT=outputs/r1 bash verl/recipe/r1/run_r1.sh [key=value ...]
#
# Any key of the generation may be set at the end of the line: `data.n_samples=64 trainer.n_gpus_per_node=8`.
# An interrupted run resumes where it stopped.
set -euo pipefail
MODEL=${MODEL:?set MODEL to a HuggingFace model: a folder or an id}
DATA=${DATA:?set DATA to a .parquet or .jsonl file with data_source, prompt and reward_model}
OUT=${OUT:-outputs/r1}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

"${PYTHON:-python}" -m verl.trainer.main_generation \
    data.path="$DATA" \
    data.prompt_key=prompt \
    data.n_samples=8 \
    data.batch_size=128 \
    data.output_path="$OUT/responses.parquet" \
    model.path="$MODEL" \
    rollout.temperature=0.6 \
    rollout.top_p=0.95 \
    rollout.prompt_length=2048 \
    rollout.response_length=32768 \
    "$@"

exec "${PYTHON:-python}" -m verl.recipe.r1.main_eval \
    data.path="$OUT/responses.parquet" \
    data.prompt_key=prompt \
    data.response_key=responses \
    custom_reward_function.path="$HERE/reward_score.py" \
    custom_reward_function.name=reward_func
