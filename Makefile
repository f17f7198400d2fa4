# A GPU machine or newer versions: `make test CONSTRAINTS=my.txt`, or `CONSTRAINTS=` for the newest that fit.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# Processes that tests run in, one thread of torch each.
WORKERS ?= auto

# Workers, and programs that tests start, share what each of them would compile anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --durations 10
INSTALL := $(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(VENV)/run.stamp ## run real prompts through the paged engine, against stock generate
	$(BIN)/paged-backend demo

test: lint types ## everything CI runs: lint, types, every test
	$(PYTEST)

test-fast: $(VENV)/dev.stamp ## the tests that take seconds
	$(PYTEST) -m "not slow"

lint: $(VENV)/dev.stamp ## check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/dev.stamp ## repair style and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# mypy cannot see an editable install of mapped folders, so link them together as they are installed.
types: $(VENV)/dev.stamp ## check types
	@rm -rf .types && mkdir -p .types/paged_backend
	@ln -s $(CURDIR)/paged_backend/* .types/paged_backend/
	@ln -s $(CURDIR)/plugins $(CURDIR)/integrations .types/paged_backend/
	@ln -s $(CURDIR)/kernels/ops .types/paged_backend/kernels
	$(BIN)/mypy

clean: ## remove the environment and everything built
	rm -rf $(VENV) .types build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# What running needs, and on top of it what developing needs.
$(VENV)/run.stamp: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is %s; set PYTHON=" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[cli,plot]"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(INSTALL) -e ".[dev]"
	@touch $@

.PHONY: help demo test test-fast lint format types clean
