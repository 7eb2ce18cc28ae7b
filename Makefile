# Two commands matter: `make run` and `make test`. Both set up what they need, from a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed
VLLM_INSTALLED := $(shell sed -n 's/^vllm==//p' constraints-vllm.txt)
# The version in constraints-sglang.txt; another one has an environment beside it: make test-sglang SGLANG=0.5.17.
SGLANG_PINNED := $(shell sed -n 's/^sglang==//p' constraints-sglang.txt)
SGLANG ?= $(SGLANG_PINNED)
SGLANG_VENV := .venv-sglang$(if $(filter-out $(SGLANG_PINNED),$(SGLANG)),-$(SGLANG))
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed
APT := apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20

.PHONY: setup run test test-numerics test-settings test-races test-vllm test-vllm-releases vllm-environment test-sglang sglang-environment check lint style types docs pytest browser generate screenshots lock wheel check-wheel test-matrix bench soak clean

setup: $(STAMP)

# Modules are compiled when they are first imported: most of what is installed never is.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $(STAMP)

run: setup
	$(BIN)/tamis demo

# What does not wait for each other runs side by side; one failure fails it all.
test:
	+$(MAKE) --no-print-directory -j 4 check

check: style types docs pytest

lint: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Tests that are free to move from a busy worker to an idle one end sooner: their lengths differ a thousandfold.
pytest: style browser
	$(BIN)/pytest -n 2 --dist worksteal -m 'not gpu and not wheel'

# Tests of numbers once more, on other inputs and with the code that torch and MKL have for other CPUs: sums are then in
# another order. CAPABILITY is default or, where the CPU has it, avx2 or avx512.
SEED ?= 1
CAPABILITY ?= default
THREADS ?= 1
PRODUCTS = $(if $(filter default,$(CAPABILITY)),MKL_CBWR=COMPATIBLE)
# The stages' tests come first: they switch Triton to its interpreter.
STAGE_TESTS := $(filter-out $(wildcard tests/ops/*/test_triton_*.py tests/ops/*/test_*_hostility.py) \
  tests/ops/attention/test_attend_launches.py, \
  $(wildcard tests/ops/*/test_*.py))
NUMERICS := $(STAGE_TESTS) tests/ops/compress/test_triton_compress.py tests/ops/rotate/test_triton_rotate.py \
  $(addprefix tests/ops/index/test_triton_,index.py index_prepare.py) \
  $(addprefix tests/integrations/test_,flashinfer.py flash_mla_contract.py) tests/test_bounds.py \
  $(addprefix tests/model/test_,absorb.py rope.py) \
  $(addprefix tests/layers/test_,mla.py recording.py v4_gathered.py mla_hf.py v4_attention_hf.py) \
  $(wildcard tests/train/test_*.py)

test-numerics: setup
	@echo "numeric tests: seed $(SEED), capability $(CAPABILITY), threads $(THREADS)"
	ATEN_CPU_CAPABILITY=$(CAPABILITY) $(PRODUCTS) $(BIN)/pytest -n 2 --dist worksteal -m 'not gpu' --seed $(SEED) \
	  --threads $(THREADS) $(NUMERICS)

# Quick tests of all stages, layers, planners and drop-ins, with what a program may have set around them. Two runs hold
# all settings: tf32 leads to products in float64, which autocast leaves alone, so they are apart.
SETTINGS_TESTS := $(filter-out tests/ops/index/test_index_hf.py tests/ops/index/test_index_mxfp4.py \
  tests/ops/write/test_write_bytes.py, $(STAGE_TESTS)) tests/ops/translate/test_triton_translate.py \
  tests/ops/attention/hopper/test_splits.py tests/cache/test_paged.py \
  $(addprefix tests/model/test_,absorb.py rope.py) $(addprefix tests/step/test_,planner.py v4_planner.py) \
  $(addprefix tests/layers/test_,mla.py v4.py v4_gathered.py) \
  $(addprefix tests/integrations/test_,flash_mla_contract.py flashinfer_v4.py deep_gemm.py) \
  $(filter-out tests/train/test_traced.py tests/train/test_modes.py, $(wildcard tests/train/test_*.py)) \
  $(wildcard tests/ops/training/test_*.py) tests/integrations/hf/test_transformers_attach.py \
  $(addprefix tests/integrations/vllm/,test_engine_metadata.py test_v4_forward.py $(addprefix classes/test_v4_,engine.py index_metadata.py indices.py))
test-settings: setup
	$(BIN)/pytest -n 2 --dist worksteal -m 'not gpu' --under bf16,meta,deterministic,autocast $(SETTINGS_TESTS)
	$(BIN)/pytest -n 2 --dist worksteal -m 'not gpu' --under float64,inference,tf32 $(SETTINGS_TESTS)

# Races in the shared memory of the CUDA kernels, as their tests run them on the host; ten minutes on two cores.
RACES := $(wildcard tests/ops/index/hopper/test_*_cuda.py) tests/ops/index/hopper/test_hopper_index_loss.py \
  $(addprefix tests/ops/attention/hopper/test_,few_heads.py hopper_gradients.py many_heads.py many_heads_bf16.py no_rope.py splits.py)
test-races: setup
	$(BIN)/pytest -n 2 --dist worksteal -m 'not gpu' --races $(RACES)

# The site, in site/; a warning is an error. What is generated from code and results is checked by the tests.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Reports are tested in a real browser. Without one its tests are skipped, and say so.
browser:
	@if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    export DEBIAN_FRONTEND=noninteractive; \
	    { $(APT) update; $(APT) install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core; } >/dev/null 2>&1 \
	      || echo "no browser: apt-get could not install chromium and chromium-driver"; \
	  else echo "no browser: install chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"; fi; \
	fi

# Write again what the documents take from code and results: pictures, tables, the list of commands.
generate: setup
	$(BIN)/python -m tools.docs

# Take the documents' pictures of both reports again, in Chromium.
screenshots: setup browser
	$(BIN)/python -m tools.screenshots

# Write requirements-lock.txt again: what is installed here, with the hashes of the package index. Needs a network.
lock: setup
	$(BIN)/python -m tools.lock

wheel: setup
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# What the index would refuse or show badly is an error here.
check-wheel: wheel
	$(BIN)/pytest -m wheel tests/test_release.py
	$(BIN)/twine check --strict dist/*

# The wheel with the lowest, the newest and other versions of what it needs, each in an environment of its own, for the
# table in docs/install.md. Some of them: make test-matrix ENVIRONMENTS='lowest "torch 2.15"'.
test-matrix: wheel
	$(BIN)/python -m tools.versions_matrix run $(ENVIRONMENTS)

# The plugin inside the real vLLM, which has an environment of its own: its dependencies would pull gigabytes. Of another
# release (VLLM=0.29.0), the Python files are unpacked beside it and imported in place of the installed one.
VLLM ?= $(VLLM_INSTALLED)
VLLM_FOLDER = $(if $(filter $(VLLM_INSTALLED),$(VLLM)),,.venv-vllm/releases/$(VLLM))
VLLM_REPORT = build/vllm-$(VLLM).xml
test-vllm: vllm-environment $(if $(VLLM_FOLDER),$(VLLM_FOLDER)/.unpacked)
	PYTHONPATH=$(if $(VLLM_FOLDER),$(VLLM_FOLDER):)$$PYTHONPATH $(VLLM_BIN)/pytest --junitxml $(VLLM_REPORT) tests/real_vllm

.venv-vllm/releases/%/.unpacked: | $(VLLM_STAMP)
	$(VLLM_BIN)/python -m tools.vllm_releases unpack $* $(@D)
	touch $@

# Every release that is supported, one after the other, for the table in docs/vllm.md.
test-vllm-releases: vllm-environment
	set -e; for release in $$($(VLLM_BIN)/python -c 'from tools.vllm_releases import *; print(*RELEASES)'); do \
	  $(MAKE) --no-print-directory test-vllm VLLM=$$release; \
	  $(VLLM_BIN)/python -m tools.vllm_releases record $$release "tests on CPU tensors" build/vllm-$$release.xml; \
	done

vllm-environment: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints-vllm.txt torch
	$(VLLM_BIN)/pip install --quiet --no-compile --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(VLLM_STAMP)

# The plugin inside the real SGLang, in an environment of its own for the same reason.
test-sglang: sglang-environment
	$(SGLANG_BIN)/pytest tests/real_sglang

sglang-environment: $(SGLANG_STAMP)

$(SGLANG_STAMP): pyproject.toml constraints-sglang.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints-sglang.txt torch
	sed 's/^sglang==.*/sglang==$(SGLANG)/' constraints-sglang.txt > $(SGLANG_VENV)/packages.txt
	$(SGLANG_BIN)/pip install --quiet --no-compile --disable-pip-version-check --no-deps -r $(SGLANG_VENV)/packages.txt
	$(SGLANG_BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(SGLANG_STAMP)

# What CI does for minutes, for as long as it takes: 10^5 fuzzed calls, 10^6 tokens through the storms, 10^4 steps in flat
# memory, and every program of the portable kernels compiled for every GPU.
soak: setup
	$(BIN)/pytest tests/reliability --calls 100000 --tokens 1000000 --steps 10000
	$(BIN)/python -m tamis.lab.offline.triton --every sm_80 sm_86 sm_89 sm_90 sm_100 sm_120 gfx942 gfx950

bench: setup
	$(BIN)/python benchmarks/cpu_step.py

clean:
	rm -rf .venv .venv-vllm .venv-sglang* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
