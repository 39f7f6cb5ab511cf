# Needs Python 3.10 or newer, and make. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo bench test sanitize check format clean

help:
	@echo "make demo     train a small language model twice, with torch.nn and with fusible (ARGS='--steps 100')"
	@echo "make bench    time blocks against eager and compiled PyTorch (ARGS='rmsnorm --plot bench.png')"
	@echo "make test     the whole test suite (ARGS='-k norm')"
	@echo "make sanitize the C++ kernels' tests with address, leak and undefined-behaviour sanitizers (g++, Linux)"
	@echo "make check    format, lint, types, structure and quick tests"
	@echo "make format   write the format that 'make check' asks for"
	@echo "make clean    remove caches, builds and the demo's files; the environment stays"
	@echo
	@echo "PYTHON=$(PYTHON) makes the environment VENV=$(VENV); both can be given, as in 'make test VENV=../venv'."

# Installed again only when what is to be installed has changed. torch comes first: the kernels are built against it.
$(READY): pyproject.toml constraints.txt setup.py fusible/build.py $(wildcard fusible/csrc/*)
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing fusible and its development environment into $(VENV)"
	@$(PIP) setuptools numpy torch
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@$(BIN)/python -c 'from fusible.kernels import library; print("C++ kernels:", library.why_not() or "built")'
	@touch $@

demo: $(READY)
	@$(BIN)/python -m fusible demo $(ARGS)

bench: $(READY)
	@$(BIN)/python -m fusible bench $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -n 2 $(ARGS)

sanitize: $(READY)
	@.ci/sanitize $(BIN)/python

check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_structure.py
	@$(BIN)/python -m pytest -q -n 2 -m quick

format: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix-only .

clean:
	rm -rf build dist fusible.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
