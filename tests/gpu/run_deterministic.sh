#!/bin/bash
# rollout.deterministic on a GPU, by one command (about 8 minutes): bits, cost, and the kernels' tiles. Results go to $1.
#
#     tests/gpu/run_deterministic.sh results
cd "$(dirname "$0")/../.."
. tests/gpu/parts.sh

nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.used --format=csv,noheader
workers=$(python3 -c "import xdist" 2>/dev/null && echo "-n 8")
part 200 bits python3 -m pytest -q $workers --tb=short --import-mode=importlib -p no:cacheprovider -o addopts= -ra \
    tests/gpu/test_gpu_deterministic.py tests/modeling/test_batch_invariant_triton.py
part 100 cost python3 benchmarks/deterministic.py --rows 256 --prompt 128 --new 256 --out "$out/deterministic.jsonl"
part 100 many-rows python3 benchmarks/deterministic.py --rows 1024 --prompt 128 --new 256 --out "$out/deterministic.jsonl"
part 120 1.5B python3 benchmarks/deterministic.py --shape 1.5B --out "$out/deterministic.jsonl"
part 200 tiles python3 benchmarks/invariant_tiles.py
echo "=== all parts"
printf '%s\n' "${codes[@]}"
tail -qn 3 "$out/cost.log" "$out/many-rows.log" "$out/1.5B.log"
