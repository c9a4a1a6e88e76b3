# make demo    reshard a small checkpoint and compare the result with the truth
# make test    all checks and all tests
# make bench   the benchmark
# make soak    random kills for some minutes: SOAK="--runs 300 --seed 7"
# make clean   remove what these made
#
# Each sets up what it needs in .venv first; only the first time takes long.

VENV ?= .venv
# Arguments for the soak test: how many runs, and the seed of layouts and moments.
SOAK ?= --runs 300 --ray-runs 30
# More arguments for pip, for example an index with smaller wheels of torch (README.md).
PIP_ARGS ?=
# The first Python that is new enough and can make environments.
BASE_PYTHON ?= $(shell for name in python3.11 python3 python; do \
	$$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$name && break; \
	done)

PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check --quiet
SOURCES := pipeline tasks cluster tests
DEMO_SOURCE := tests/data/fixtures/mp2dp4-fp16-fused
DEMO_TARGET := demo-output

.PHONY: demo test bench soak clean
.DELETE_ON_ERROR:

demo: $(VENV)/.run-ready
	@rm -rf $(DEMO_TARGET)
	$(PYTHON) -m pipeline.inspect $(DEMO_SOURCE)
	$(PYTHON) -m pipeline.reshard $(DEMO_SOURCE) $(DEMO_TARGET) --mp 1 --dp 1 --layout unflat --state drop
	$(PYTHON) -m pipeline.inspect $(DEMO_TARGET)
	$(PYTHON) -m tests.demo_check $(DEMO_TARGET)/checkpoint_last.pt $(DEMO_SOURCE)/truth.pt

# All parts run, whichever fail, so that one run tells everything.
test: $(VENV)/.test-ready
	@failed=; \
	part() { echo "$$*"; "$$@" || failed=1; }; \
	part $(PYTHON) -m ruff check $(SOURCES); \
	part $(PYTHON) -m ruff format --check $(SOURCES); \
	part $(PYTHON) -m mypy; \
	part $(PYTHON) -m pytest $(SOURCES); \
	test -z "$$failed"

bench: $(VENV)/.test-ready
	$(PYTHON) -m tests.benchmarks.run

soak: $(VENV)/.test-ready
	$(PYTHON) -m tests.faults.soak $(SOAK)

clean:
	rm -rf $(VENV) $(DEMO_TARGET) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(PYTHON):
	@test -n "$(BASE_PYTHON)" || { echo "no Python of 3.11 or newer that has venv: install one (Debian: python3.11-venv), or name it: make BASE_PYTHON=..." >&2; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: requirements.txt | $(PYTHON)
	@echo "installing requirements.txt into $(VENV): once, and torch is large"
	@$(PIP) install $(PIP_ARGS) -r requirements.txt
	@touch $@

$(VENV)/.test-ready: requirements-test.txt $(VENV)/.run-ready
	@echo "installing requirements-test.txt into $(VENV): once"
	@$(PIP) install $(PIP_ARGS) -r requirements-test.txt
	@touch $@
