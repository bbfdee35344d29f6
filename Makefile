# One entry for people and CI.  `make` lists what there is.

# Debian's own interpreter where it is new enough: units with User= cannot use one below a home.
PYTHON ?= $(shell for p in /usr/bin/python3 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt
SOURCES := umad tests packaging

.PHONY: help setup fix check test test-all test-gpu bench run package deb clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "%-10s %s\n", $$1, $$2 }'

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is missing: apt-get install python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "venv is missing: apt-get install python3-venv"; exit 1; }
	@command -v cc >/dev/null || { echo "a C compiler is missing: apt-get install gcc libc6-dev"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/serve.stamp: .venv/bin/python pyproject.toml tests/constraints.txt
	@echo "installing umad with what umad-serve needs (torch, transformers, diffusers: some minutes the first time)"
	$(PIP) -e '.[serve]'
	@touch $@

.venv/test.stamp: .venv/serve.stamp
	$(PIP) -e '.[serve,test]'
	@touch $@

setup: .venv/test.stamp ## make the virtual environment with everything

run: .venv/serve.stamp ## the demonstration: five models, one greedy worker; ONCE=1 ends by itself
	@$(BIN)/python -m tests.demo.run $(if $(ONCE),--once)

fix: .venv/test.stamp ## format and mend what ruff can mend
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

check: .venv/test.stamp ## the quick gate: lint, types, walls, fast tests
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q -m 'not slow and not models and not systemd'

test: .venv/test.stamp ## everything that needs no GPU
	$(BIN)/pytest -q -m 'not package'

test-all: test ## and the Debian package: built, installed, upgraded and purged in clean systems
	$(BIN)/pytest -q -m package

test-gpu: .venv/test.stamp ## what needs a GPU
	$(BIN)/pytest -q tests/gpu

bench: .venv/test.stamp ## the figures of DESIGN 11; ONLY=key for one
	@$(BIN)/python -m tests.bench $(ONLY)

package: .venv/test.stamp ## the wheel, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

deb: .venv/test.stamp ## the Debian package, in dist/
	packaging/build-deb

clean: ## remove what was built, the demonstration's checkpoints included
	rm -rf .venv .work dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
