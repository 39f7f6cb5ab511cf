# Needs Python 3.10 or newer, and make. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo bench test test-kernels check format clean

help:
	@echo "make demo     train a small language model twice, with torch.nn and with fusible (ARGS='--steps 100')"
	@echo "make bench    time blocks against eager and compiled PyTorch (ARGS='rmsnorm --plot bench.png')"
	@echo "make test     the whole test suite (ARGS='-k norm')"
	@echo "make test-kernels  build the C++ kernels (experimental) into the checkout and run their tests"
	@echo "make check    format, lint, types, structure and quick tests"
	@echo "make format   write the format that 'make check' asks for"
	@echo "make clean    remove caches, builds and the demo's files; the environment stays"
	@echo
	@echo "PYTHON=$(PYTHON) makes the environment VENV=$(VENV); both can be given, as in 'make test VENV=../venv'."

# Installed again only when what is to be installed has changed.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing fusible and its development environment into $(VENV)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/python -m fusible demo $(ARGS)

bench: $(READY)
	@$(BIN)/python -m fusible bench $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -n 2 $(ARGS)

test-kernels: $(READY)
	@$(BIN)/python -m fusible build
	@$(BIN)/python -m pytest -q -n 2 tests/test_cpu_math.py

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
