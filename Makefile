# make demo    reshard a small checkpoint and compare the result with the truth
# make test    all checks and all tests
# make test-servers   more tests: against Ceph's gateway and a kernel's NFS; installs them, as root, where there is apt
# make bench   the benchmark
# make soak    random kills for some minutes: SOAK="--runs 300 --seed 7"
# make clean   remove what these made
#
# Each sets up what it needs in .venv first; only the first time takes long.

VENV ?= .venv
# Arguments for the soak test: how many runs, and the seed of layouts and moments.
SOAK ?= --runs 400 --ray-runs 30 --s3-runs 20
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

# What test-servers needs of Debian, and what it runs against the other store.
SERVER_PACKAGES := radosgw ceph-mon ceph-osd user-mode-linux nfs-kernel-server kmod iproute2
STORE_TESTS := tests/tasks/storage/test_s3.py tests/faults/test_node_loss.py tests/faults/test_pieces.py tests/faults/test_s3_bad_days.py \
	tests/faults/test_takeover.py tests/faults/test_driver_kills.py

.PHONY: demo test test-servers bench soak clean
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
	part $(PYTHON) -m pytest -n 3 --dist loadfile $(SOURCES); \
	test -z "$$failed"

# Without root or apt, what cannot be tested is skipped and says so.
test-servers: $(VENV)/.test-ready
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends $(SERVER_PACKAGES) >/dev/null 2>&1 || echo "apt-get failed"; fi
	@rm -rf $(VENV)/nfs; mkdir $(VENV)/nfs; \
	for version in 4.2 3; do $(PYTHON) -m tests.nfs.guest $$version || touch $(VENV)/nfs/failed; done >$(VENV)/nfs/log 2>&1 & \
	failed=; \
	RESHARD_TEST_STORE=ceph $(PYTHON) -m pytest -k "s3 or S3" $(STORE_TESTS) || failed=1; \
	wait; cat $(VENV)/nfs/log; \
	if [ -e $(VENV)/nfs/failed ]; then failed=1; fi; rm -r $(VENV)/nfs; \
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
