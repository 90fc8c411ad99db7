# Every target makes the virtual environment it needs, once, and again when what is to be installed changes.
#   make quickstart                     PYTHON=python3.12 chooses another interpreter
#   make test ARGS="-k manifest"        ARGS goes to pytest
#   make test WORKERS=4                 files of tests at once; each takes about 2 GB, with its pool of ranks

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
INPUTS := pyproject.toml setup.py constraints.txt \
  $(wildcard $(foreach place,* */*,kernels/dsx_kernels/$(place).h kernels/dsx_kernels/$(place).cpp))
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint types docs clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(VENV)/.ready ## install, then train a small GPT on Python's own sources: about a minute on two cores
	$(BIN)/dsx run docs/manifests/quickstart.toml --overwrite
	@printf '\nThe command dsx is in %s/bin; to have it at hand:  . %s/bin/activate\n' '$(VENV)' '$(VENV)'

test: $(VENV)/.ready-test ## run the test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(VENV)/.ready-lint ## ruff
	$(BIN)/ruff check .

types: $(VENV)/.ready-lint ## mypy --strict
	$(BIN)/mypy core plugins kernels

docs: $(VENV)/.ready-docs ## generate the reference and build the site into site/, warnings are errors
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environment and everything built; runs/ stays
	rm -rf $(VENV) build dist site core/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "dsx needs Python 3.11 or newer, and '$(PYTHON)' is `$(PYTHON) --version 2>/dev/null || echo not here`."; \
	  echo "Name another one: make $(or $(MAKECMDGOALS),quickstart) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.ready: $(INPUTS) | $(BIN)/python
	$(INSTALL) .
	@touch $@

$(VENV)/.ready-%: $(INPUTS) | $(BIN)/python
	$(INSTALL) ".[$*]"
	@touch $@
