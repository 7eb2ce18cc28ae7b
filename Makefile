# Two commands matter: `make run` and `make test`. Both set up what they need, from a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup run test lint docs generate wheel check-wheel bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,docs]'
	touch $(STAMP)

run: setup
	$(BIN)/tamis demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint docs
	$(BIN)/pytest -n 2 -m 'not gpu and not wheel'

# The site, in site/; a warning is an error. What is generated from code and results is checked by the tests.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Write again what the documents take from code and results: pictures, tables, the list of commands.
generate: setup
	$(BIN)/python -m tools.docs

wheel: setup
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist .

check-wheel: wheel
	$(BIN)/pytest -m wheel tests/test_release.py

bench: setup
	$(BIN)/python benchmarks/cpu_step.py

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
