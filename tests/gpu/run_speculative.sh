#!/bin/bash
# Speculative decoding on one GPU (about 4 minutes): answers equal to plain decoding, speed with copied text, and models
# without fused layers beside transformers. Results go to $1 (a folder).
#
#     tests/gpu/run_speculative.sh results
cd "$(dirname "$0")/../.."
. tests/gpu/parts.sh

workers=$(python3 -c "import xdist" 2>/dev/null && echo "-n 8")
part 80 correctness python3 -m pytest -q $workers --tb=short --import-mode=importlib -p no:cacheprovider -o addopts= -ra \
    -k "speculative or greedy_equals_transformers or whatever_the_blocks" tests/gpu/test_gpu_rollout.py
part 75 copied python3 benchmarks/speculative.py --drafts 4 7 --repeats 2 --out "$out/speculative.jsonl"
part 25 novel python3 benchmarks/speculative.py --circle 0 --new 1024 --repeats 2 --out "$out/speculative.jsonl"
part 90 families python3 benchmarks/rollout.py --engines native,hf --suite families --repeats 1 --out "$out/families.jsonl"
echo "=== all parts"
printf '%s\n' "${codes[@]}"
for name in copied novel families; do tail -n 11 "$out/$name.log" | grep -v '^{'; done
