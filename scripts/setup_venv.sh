#!/usr/bin/env bash
# Make the virtual environment $1 and install the project into it with the extras $2 (say plot,test), with the build of
# torch that fits this machine:
# the CPU build (no CUDA packages) where there is no NVIDIA GPU, the default build where there is one.
# PYTHON=python3.12 chooses the interpreter, TORCH="torch==..." another torch (installed as it is written).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
extras=${2:-plot,test}
torch_version=2.13.0

interpreter() {  # the first Python that is new enough; the one named in PYTHON first
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.11 or newer found (looked at ${PYTHON:-python3}, python3.13, python3.12, python3.11)." >&2
    echo "Install one, or name it: make PYTHON=/path/to/python3.12 quickstart" >&2
    return 1
}

install_torch() {
    if [ -n "${TORCH:-}" ]; then
        pip install "$TORCH"
    elif nvidia-smi -L >/dev/null 2>&1 || [ "$(uname -s)" = Darwin ]; then
        pip install "torch==$torch_version"
    # An index may offer the CPU build by its own version; uv knows where the CPU builds are when none does.
    elif pip install --quiet "torch==$torch_version+cpu" 2>/dev/null; then
        :
    elif pip install --quiet uv && "$venv/bin/uv" pip install --python "$venv/bin/python" --torch-backend=cpu "torch==$torch_version"; then
        :
    else
        echo "WARNING: no CPU build of torch $torch_version was found; the default build is installed. It works here," >&2
        echo "WARNING: but it brings several gigabytes of CUDA packages that this machine has no use for." >&2
        pip install "torch==$torch_version"
    fi
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

python=$(interpreter)
if [ ! -x "$venv/bin/python" ]; then
    echo "Making $venv with $("$python" -V)"
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        echo "$python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
        exit 1
    fi
fi

constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    echo "Installing torch"
    install_torch
fi
# Nothing that is installed afterwards may replace the torch that is here.
"$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch").split("+")[0])' >"$constraint"
echo "Installing the project"
pip install --quiet --constraint "$constraint" --editable ".[$extras]"
"$venv/bin/python" -c 'import torch; print("Ready: torch", torch.__version__, "with", "CUDA" if torch.cuda.is_available() else "CPU")'
