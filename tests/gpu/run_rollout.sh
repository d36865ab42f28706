#!/bin/bash
# Everything about rollout that needs a GPU, by one command: correctness, then speed, then where the time goes. A part
# that fails or takes too long does not cost the others. Results go to $1 (a folder); $2: "short" (about 3 minutes, two
# settings), "full" (about 10, all of them) or "against" (10, beside vLLM and transformers; both must be installed).
#
#     tests/gpu/run_rollout.sh results short
cd "$(dirname "$0")/../.."
. tests/gpu/parts.sh
mode=${2:-full}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.used --format=csv,noheader
# most of the time of the tests goes into compiling kernels
workers=$(python3 -c "import xdist" 2>/dev/null && echo "-n 8")
[ "$mode" = against ] || part 110 correctness python3 -m pytest -q $workers --tb=short --import-mode=importlib -p no:cacheprovider -o addopts= -ra \
    tests/gpu/test_gpu_rollout.py
if [ "$mode" = short ]; then
    part 60 0.5B python3 benchmarks/rollout.py --engines native --shape 0.5B --rows 256 --prompt 128 --new 256 --profile \
        --out "$out/rollout.jsonl"
    part 60 7B python3 benchmarks/rollout.py --engines native --shape 7B --rows 256 --prompt 512 --new 256 --repeats 2 \
        --profile --out "$out/rollout.jsonl"
    part 60 attention python3 benchmarks/attention.py --warps 2,4,8 --stages 2,4
elif [ "$mode" = against ]; then # vLLM takes one to two minutes to start
    part 330 0.5B python3 benchmarks/rollout.py --suite vllm --shape 0.5B --engines native,vllm --repeats 2 --out "$out/rollout.jsonl"
    part 200 7B python3 benchmarks/rollout.py --suite vllm --shape 7B --engines native,vllm --repeats 2 --out "$out/rollout.jsonl"
    part 120 transformers python3 benchmarks/rollout.py --shape 0.5B --rows 256 --prompt 128 --new 256 --repeats 2 \
        --engines native,hf,hf-static --out "$out/rollout.jsonl"
else
    part 90 attention python3 benchmarks/attention.py --warps 4 --stages 2,3 --blocks 1,2 --programs 512,1024
    part 330 speed python3 benchmarks/rollout.py --suite h200 --engines native --repeats 2 --out "$out/rollout.jsonl"
fi
echo "=== all parts"
printf '%s\n' "${codes[@]}"
python3 - "$out/rollout.jsonl" <<'END'
import json, sys
print("   tok/s  x floor  seconds  first s  setting")
for line in map(json.loads, open(sys.argv[1])):
    setting = "{shape} {rows} rows {prompt}+{new} samples {samples} {lengths} top_p {top_p} {engine}".format(**line)
    print("{tokens_per_second:8,} {times_floor:8} {seconds:8} {first_seconds:8} ".format(**line), setting)
END
