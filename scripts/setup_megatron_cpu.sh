#!/usr/bin/env bash
# Create the virtual environment $1 with the project, its test dependencies and megatron-core, for the tests of
# strategy=megatron on a CPU (2 GB on disk). Training with megatron-core needs a GPU: pip install -e '.[megatron]'.
#
#   bash scripts/setup_megatron_cpu.sh .venv-megatron
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv-megatron}
version=$(sed -n 's/^TESTED = "\([0-9.]*\)".*/\1/p' verl/engines/megatron/traits.py)

bash scripts/setup_venv.sh "$venv" test
echo "Installing megatron-core $version"
# its requirements (torch, numpy, packaging) are installed
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "megatron-core==$version"
"$venv/bin/python" -W ignore -c 'import megatron.core; print("Ready: megatron-core", megatron.core.__version__)'
