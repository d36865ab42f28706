#!/usr/bin/env bash
# Install this project and the extras that it supports into the active Python environment (PYTHON selects another one).
#
#   bash scripts/install_vllm_sglang_mcore.sh
#   USE_MEGATRON=0 bash scripts/install_vllm_sglang_mcore.sh
#
# The script has the same name in public verl. Rollout engines of this version are `native`, `hf`, `vllm` and `sglang`,
# training engines `fsdp`, `fsdp2` and `megatron`. vLLM is installed on a host with a GPU; on a CPU, see
# scripts/setup_vllm_cpu.sh. SGLang needs another torch than vLLM, so it is not installed: EXTRAS=sglang in a separate
# environment. USE_MEGATRON=1 installs megatron-core. For a virtual environment with the CPU build of torch, see
# scripts/setup_venv.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python}
extras=${EXTRAS:-ray,lora,track,plot}

if [ "${USE_MEGATRON:-0}" != 0 ]; then
    extras="$extras,megatron"
fi
echo "Not installed, because this version does not use them: flash-attn, transformer-engine, apex"

if nvidia-smi -L >/dev/null 2>&1; then
    extras="$extras,liger" # needs a GPU, as vLLM does
    [[ ",$extras," == *,sglang,* ]] || extras="$extras,vllm"
fi
echo "Installing the project with the extras $extras"
"$python" -m pip install --quiet --editable ".[$extras]"
"$python" -m verl.utils.env_check
