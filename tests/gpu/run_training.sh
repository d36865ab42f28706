#!/bin/bash
# Everything about the update that needs a GPU, by one command: correctness, then speed, then where the time goes. A part
# that fails or takes too long does not cost the others. Results go to $1 (a folder); $2: "short" (about 1 minute) or
# "full" (about 9).
#
#     tests/gpu/run_training.sh results short
cd "$(dirname "$0")/../.."
. tests/gpu/parts.sh
mode=${2:-full}

step() { # seconds at most, name, arguments of the benchmark
    local limit=$1 name=$2
    shift 2
    part "$limit" "$name" python3 benchmarks/train_step.py --out "$out/train_step.jsonl" "$@"
}

uptime
nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.used --format=csv,noheader
workers=$(python3 -c "import xdist" 2>/dev/null && echo "-n 6")
compiled=$([ "$mode" = short ] && echo "not compiled" || echo "test")
part 70 correctness python3 -m pytest -q $workers --tb=short --import-mode=importlib -p no:cacheprovider -o addopts= \
    -ra -k "$compiled" tests/gpu/test_gpu_training.py tests/modeling/test_layer_functions.py
step 70 fused --suite rl --variants fused --repeats 2 --profile
if [ "$mode" != short ]; then
    step 40 16k --suite 16k --variants fused --repeats 1 --profile
    step 90 plain --suite rl --variants plain,transformers --repeats 2
    step 100 compiled --suite rl --variants compiled --repeats 2
    step 60 16k_others --suite 16k --variants compiled,plain --repeats 2
    step 200 long --suite long --variants fused --repeats 1
    part 60 attention python3 benchmarks/train_attention.py
fi
echo "=== all parts"
printf '%s\n' "${codes[@]}"
grep -hE "^(rl|16k) |^ *[a-zA-Z ,-]+ [0-9.]+ ms" "$out"/*.log # where the time of the updates goes
python3 - "$out/train_step.jsonl" <<'END'
import json, sys
print("update s  reference s  kernels of both  tokens/s    MFU  peak GiB  first s  gradient's norm  setting")
for line in map(json.loads, open(sys.argv[1])):
    setting = "{name} {shape} {rows} x ({prompt}+{response}), {samples} to a prompt, {micro} a micro-batch, {variant}".format(**line)
    columns = "{update_seconds:8} {reference_seconds:12} {update_kernel_seconds!s:>8} {reference_kernel_seconds!s:>7} {tokens_per_second:9,} {mfu:6} {peak_gib:9} {first_update_seconds:8} "
    print(columns.format(**line), "{grad_norm:15.6f}".format(**line), setting)
END
