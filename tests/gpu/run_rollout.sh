#!/bin/bash
# Everything about rollout that needs a GPU, by one command: correctness, then speed. Results go to $1 (a folder).
#
#     tests/gpu/run_rollout.sh results
set -u
cd "$(dirname "$0")/../.."
out=${1:?folder for the results}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
parallel=$(python3 -c "import xdist" 2>/dev/null && echo "-n 6") # most of the time goes into compiling kernels
python3 -m pytest -q $parallel --import-mode=importlib -o addopts= tests/gpu/test_gpu_rollout.py 2>&1 | tee "$out/correctness.log"
passed=${PIPESTATUS[0]}
python3 benchmarks/startup.py --repeats 2 | tee "$out/startup.json"
python3 benchmarks/rollout.py --suite h200 --engines native --out "$out/rollout.jsonl" | tee "$out/rollout.log"
exit "$passed"
