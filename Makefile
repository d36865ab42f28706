# `make quickstart` and `make test` are all that a fresh clone needs: both make .venv when there is none.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/.ready-to-run
TEST := $(VENV)/.ready-to-test
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest

.PHONY: quickstart test test-all lint clean

# Train a tiny model by reinforcement learning and watch it learn. ARGS="--algorithm ppo" is passed on.
quickstart: $(RUN)
	$(VENV)/bin/python examples/quickstart/run.py $(ARGS)

# What every change must pass: under 10 minutes on two cores, no GPU. ARGS="-k name" is passed on.
test: $(TEST)
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

# The slow tests too. Those marked `gpu` are run by `pytest -m gpu` on a machine that has one.
test-all: $(TEST)
	$(PYTEST) -m "not gpu" $(ARGS)

lint: $(VENV)/bin/ruff
	$(VENV)/bin/ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache

# Made again when the dependencies change; otherwise there is nothing to do.
$(RUN): pyproject.toml scripts/setup_venv.sh
	PYTHON="$(PYTHON)" bash scripts/setup_venv.sh $(VENV) plot
	touch $@

# The tests need more: pytest, Ray, peft.
$(TEST): pyproject.toml scripts/setup_venv.sh
	PYTHON="$(PYTHON)" bash scripts/setup_venv.sh $(VENV) plot,test
	touch $(RUN) $@

$(VENV)/bin/ruff: $(RUN)
	$(VENV)/bin/python -m pip install --quiet ruff
