#!/usr/bin/env bash
# Create the virtual environment $1 and install the project with the extras $2 (such as plot,test). Installs the CPU
# build of torch (no CUDA packages) if there is no NVIDIA GPU, otherwise the default build.
# PYTHON=python3.12 selects the interpreter, DEVICE=cpu or DEVICE=cuda the build of torch, TORCH="torch==..." its version.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
extras=${2:-plot,test}
device=${DEVICE:-auto}
torch_version=2.13.0

case "$device" in
    auto | cpu | cuda) ;;
    *)
        echo "DEVICE: expected auto, cpu or cuda, found '$device'" >&2
        exit 1
        ;;
esac

interpreter() {  # the first Python that is recent enough, starting with $PYTHON
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.11 or newer found (tried ${PYTHON:-python3}, python3.13, python3.12, python3.11)." >&2
    echo "Install one, or specify it: make PYTHON=/path/to/python3.12 quickstart" >&2
    return 1
}

default_build() {  # whether the default build of torch is wanted: it includes CUDA on Linux
    [ "$device" = cuda ] || [ "$(uname -s)" = Darwin ] || { [ "$device" = auto ] && nvidia-smi -L >/dev/null 2>&1; }
}

install_torch() {
    if [ -n "${TORCH:-}" ]; then
        pip install --quiet "$TORCH"
    elif default_build; then
        pip install --quiet "torch==$torch_version"
    # some indexes list the CPU build by version; otherwise uv knows where the CPU builds are
    elif pip install --quiet "torch==$torch_version+cpu" 2>/dev/null; then
        :
    elif pip install --quiet uv && "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --torch-backend=cpu "torch==$torch_version"; then
        :
    else
        echo "WARNING: no CPU build of torch $torch_version found; installing the default build. It works without a GPU," >&2
        echo "WARNING: but includes several gigabytes of CUDA packages." >&2
        pip install --quiet "torch==$torch_version"
    fi
}

# The programs in responses run in namespaces of bubblewrap where it is installed; tests of that mode are skipped without
# it. It is no Python package, so it is tried for tests only, as root, on Debian and Ubuntu.
try_bubblewrap() {
    case ",$extras," in *,test,*) ;; *) return ;; esac
    if ! command -v bwrap >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        timeout 60 bash -c "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap" >/dev/null 2>&1 ||
            echo "bubblewrap could not be installed (apt-get install bubblewrap): the tests that need it are skipped" >&2
    fi
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ -L "$venv" ]; then  # pip would change the environment of another checkout
    echo "$venv is a link to $(readlink "$venv"): remove it (rm $venv), or activate that environment and do not run this script" >&2
    exit 1
fi
python=$(interpreter)
if [ ! -x "$venv/bin/python" ]; then
    echo "Creating $venv with $("$python" -V)"
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        echo "$python cannot create a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
        exit 1
    fi
fi

constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    echo "Installing torch (200 MB for a CPU, several gigabytes with CUDA)"
    install_torch
fi
# later installs must not replace the installed torch
"$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch").split("+")[0])' >"$constraint"
echo "Installing the project"
pip install --quiet --constraint "$constraint" --editable ".[$extras]"
try_bubblewrap
"$venv/bin/python" -c 'import torch; print("Ready: torch", torch.__version__, "with", "CUDA" if torch.cuda.is_available() else "CPU")'
