# Everything sets itself up: a bare machine needs python3 (3.11 or newer), make and a package index.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
BENCH := .venv-bench
DOCS := .venv-docs
INSTALL := $(PYTHON) tools/install.py
CODE := src tests benchmarks examples tools
# Two workers, or as many as JOBS says.
PYTEST = $(BIN)/pytest -n $(or $(JOBS),2) --durations=25
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Hundreds of processes start in the tests: none compiles torch again, whatever the shell says.
export PYTHONDONTWRITEBYTECODE =
# Small models on a shared machine: one thread each is faster than threads that wait for others.
export OMP_NUM_THREADS ?= 1

.PHONY: setup chromium demo quick lint test guides training machines fuzz test-all bench docs release-check lock clean

setup: $(VENV)/.installed chromium

$(VENV)/.installed: pyproject.toml constraints.txt
	$(INSTALL) $(VENV) --constraints constraints.txt --editable '.[dev]'
	$(BIN)/python -m batchwright.ahead
	touch $@ $(VENV)/.demo

# The tests of the page need a browser. Without one, and where this cannot install it, they are
# skipped and say so.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium || echo "no chromium: the tests of the page are skipped"; \
	else echo "no chromium: the tests of the page are skipped; install it as root"; fi

demo: $(VENV)/.demo
	$(BIN)/batchwright demo --out demo

# Only what the demo runs: no trackers, no trainers of others.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(INSTALL) $(VENV) --constraints constraints.txt --editable . torch transformers matplotlib
	$(BIN)/python -m batchwright.ahead
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

# The inner loop: no process, no server, no training; under a minute.
quick: $(VENV)/.installed
	$(BIN)/ruff check $(CODE)
	$(PYTEST) tests --quick -m 'not slow and not guides and not training and not machines'

test: lint chromium
	$(PYTEST) -m 'not slow and not guides and not training and not machines'

# Every page of docs/ and the README, typed as they stand, and the installer behind `make`.
guides: $(VENV)/.installed
	$(PYTEST) tests/test_docs.py tests/test_install.py -m 'guides and not slow'

# Whole training runs, resumed, killed, on several ranks; and the classes of other libraries.
training: $(VENV)/.installed
	$(PYTEST) tests -m 'training and not slow'

# Ray clusters of several nodes on this machine, nodes that are lost, and object stores.
machines: $(VENV)/.machines
	$(BIN)/pytest -n 1 --durations=25 tests -m 'machines and not slow'

$(VENV)/.machines: $(VENV)/.installed
	$(INSTALL) $(VENV) --constraints constraints.txt --editable '.[ray,remote]' 'moto[server]>=5' gcp-storage-emulator
	touch $@

# Every format damaged and crafted in thousands of ways; MUTATIONS and SEED choose others.
fuzz: $(VENV)/.installed
	$(BIN)/python tests/fuzz/fuzz.py --mutations $(or $(MUTATIONS),10000) --seed $(or $(SEED),1)

test-all: lint $(VENV)/.machines
	$(PYTEST)

# Those that train or tokenize for long run in small here; alone and without --quick, they measure all.
LONG := $(addprefix benchmarks/bench_,kg.py ppo.py prover_policies.py sft.py tokenize.py)

bench: $(BENCH)/.installed
	for script in $(filter-out $(LONG),$(wildcard benchmarks/bench_*.py)); do $(BENCH)/bin/python $$script || exit 1; done
	for script in $(LONG); do $(BENCH)/bin/python $$script --quick || exit 1; done

# The peers stand in a venv of their own; one that does not build here is left out and said so.
$(BENCH)/.installed: pyproject.toml benchmarks/requirements.txt
	$(INSTALL) $(BENCH) --editable '.[train,hf,plot,lp,gpt2,local,rl]'
	$(BENCH)/bin/python benchmarks/install_peers.py
	$(BENCH)/bin/python -m batchwright.ahead
	$(BENCH)/bin/batchwright models get smollm2
	touch $@

# The pages are built from the sources as text, so their environment needs nothing of ours.
docs: $(DOCS)/.installed
	$(DOCS)/bin/python tools/tree.py
	$(DOCS)/bin/python benchmarks/readme_numbers.py
	$(DOCS)/bin/zensical build --clean --strict

$(DOCS)/.installed:
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet zensical==0.0.73 mkdocstrings-python==2.0.10
	touch $@

release-check:
	$(PYTHON) tools/release_check.py

# Take the newest versions that pyproject.toml allows; commit what the tests pass with.
lock:
	rm -rf .venv-lock
	$(INSTALL) .venv-lock --editable '.[dev]'
	$(PYTHON) tools/lock.py .venv-lock constraints.txt
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) $(BENCH) $(DOCS) .venv-verl demo dist site .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build src/batchwright/compiled
