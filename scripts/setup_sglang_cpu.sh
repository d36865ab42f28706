#!/usr/bin/env bash
# Create the virtual environment $1 with the project, its test dependencies and SGLang for tests on a CPU, 4 GB on disk.
#
#   bash scripts/setup_sglang_cpu.sh .venv-sglang
#
# SGLang has no kernels for a CPU in package indexes: tests/rollout/sglang_cpu replaces the packages that it imports, so
# this environment is for tests only. On a host with a GPU: pip install -e '.[sglang]' into a separate environment.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv-sglang}
version=0.5.23

bash scripts/setup_venv.sh "$venv" test,lora
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

echo "Installing SGLang $version without its GPU packages"
pip --no-deps "sglang==$version"
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT
"$venv/bin/python" - "$lists" <<'END'
import importlib.metadata as metadata
import re
import sys
from pathlib import Path

# for GPUs, for media, and for servers that are not started
left_out = r"torch|flash|flashinfer|humming|nvidia-cutlass|nvidia-mathdx|nvshmem|cuda|quack|sgl-|sglang-|tilelang|timm|apache-tvm"
left_out += r"|anthropic|smg|kernels|modelscope|build|av|decord|deepseek|tml"
wanted = [line for line in metadata.requires("sglang") if "extra ==" not in line]
wanted = [line for line in wanted if not re.match(rf"({left_out})([-_a-z0-9]*)\b", line, re.IGNORECASE)]
Path(sys.argv[1], "requirements").write_text("\n".join(wanted) + "\n")
Path(sys.argv[1], "constraint").write_text("torch==" + metadata.version("torch").split("+")[0] + "\n")
END
pip --constraint "$lists/constraint" --requirement "$lists/requirements"
# for models with images; it requires the packages of CUDA, which are not used
read -r torchvision < <("$venv/bin/python" - <<'END'
import importlib.metadata as metadata

_, minor, patch = metadata.version("torch").split("+")[0].split(".")
print(f"torchvision==0.{int(minor) + 15}.{patch}")
END
)
pip --no-deps "$torchvision"
PYTHONPATH=tests/rollout/sglang_cpu SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -W ignore \
    -c 'import sglang; sglang.Engine; print("Ready: SGLang", sglang.__version__)' 2>/dev/null
