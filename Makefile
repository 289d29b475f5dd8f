# Everything sets itself up: a bare machine needs python3 (3.11 or newer), make and a package index.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Small models on a shared machine: one thread each is faster than threads that wait for others.
export OMP_NUM_THREADS ?= 1
BENCH := .venv-bench

.PHONY: setup demo test test-all lint bench docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/batchwright demo --out demo

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -n 2 -m 'not slow'

test-all: lint
	$(BIN)/pytest -n 2

bench: $(BENCH)/.installed
	for script in benchmarks/bench_*.py; do $(BENCH)/bin/python $$script || exit 1; done

# The peers stand in a venv of their own; one that does not build here is left out and said so.
$(BENCH)/.installed: pyproject.toml benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --editable '.[train,hf,plot,lp,gpt2,local,rl]'
	$(BENCH)/bin/python benchmarks/install_peers.py
	touch $@

docs: $(STAMP)
	$(BIN)/pytest -q tests/test_docs.py

clean:
	rm -rf $(VENV) $(BENCH) .venv-verl demo dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
