# Two commands matter: `make run` and `make test`. Both set up what they need, from a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed

.PHONY: setup run test test-vllm lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

run: setup
	$(BIN)/tamis demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 -m 'not gpu'

# The plugin inside the real vLLM, which has an environment of its own: its dependencies would pull gigabytes.
test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/pytest tests/real_vllm

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/pip install --quiet --upgrade pip
	$(VLLM_BIN)/pip install --quiet -c constraints-vllm.txt torch
	$(VLLM_BIN)/pip install --quiet --no-deps --no-compile -r constraints-vllm.txt
	$(VLLM_BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $(VLLM_STAMP)

bench: setup
	$(BIN)/python benchmarks/cpu_step.py

clean:
	rm -rf .venv .venv-vllm build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
