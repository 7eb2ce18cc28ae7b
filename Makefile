# Two commands matter: `make run` and `make test`. Both set up what they need, from a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup run test lint bench browser clean

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

# Reports are tested in a real browser. Without one its tests are skipped, and say so.
browser:
	@if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    export DEBIAN_FRONTEND=noninteractive; \
	    { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver fonts-dejavu-core; } >/dev/null 2>&1 \
	      || echo "no browser: apt-get could not install chromium and chromium-driver"; \
	  else echo "no browser: install chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"; fi; \
	fi

test: lint browser
	$(BIN)/pytest -n 2 -m 'not gpu'

bench: setup
	$(BIN)/python benchmarks/cpu_step.py

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
