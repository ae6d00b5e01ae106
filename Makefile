# Needs make and Python >= 3.10, nothing else: the first target that is run builds .venv.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
STAMP = $(VENV)/.installed
# Two workers: each test is mostly one thread of Python, and tests/conftest.py gives each worker one torch thread.
WORKERS ?= 2
TORCHES ?= 2.11.0 2.13.0 2.14.1
PYTHONS ?= $(shell for v in 3.10 3.11 3.12 3.13; do command -v python$$v; done)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-gpu check format bench matrix clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  \1\t/' | expand -t 14

venv: $(STAMP) ## build .venv (again only when pyproject.toml or constraints.txt changed)

# torch comes first and alone, by its exact version: resolved together with the rest, pip may take a larger build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,demo,dev]'
	@touch $@

demo: $(STAMP) ## one unmodified transformers layer and one token loop: eager, inductor, flashqla (about 4 minutes)
	$(PY) -m qlacompile demo

test: $(STAMP) ## all tests that need no GPU
	$(PY) -m pytest -q -n $(WORKERS)

test-gpu: $(STAMP) ## the tests that need a GPU
	$(PY) -m pytest -q -m gpu

check: $(STAMP) ## lint, format, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy -p qlacompile

format: $(STAMP) ## apply the format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP) ## the CPU benchmarks; rows go to benchmarks/results
	$(PY) -m qlacompile bench

# Every torch with the default Python, then every Python with the default torch; each in a venv of its own.
matrix: ## the tests under each supported torch and each Python found
	@set -e; status=0; \
	run() { \
	  echo "== torch $$2, $$1"; venv=.venv-$$2-$$(basename $$1); \
	  [ -x $$venv/bin/python ] || $$1 -m venv $$venv; \
	  pins=$$venv/constraints.txt; sed "s/^torch==.*/torch==$$2/" constraints.txt > $$pins; \
	  $$venv/bin/python -m pip install -q --disable-pip-version-check -c $$pins torch && \
	  $$venv/bin/python -m pip install -q --disable-pip-version-check -c $$pins -e '.[test]' && \
	  $$venv/bin/python -m pytest -q -n $(WORKERS) || status=1; \
	}; \
	for torch in $(TORCHES); do run $(PYTHON) $$torch; done; \
	default=$$(sed -n 's/^torch==//p' constraints.txt); \
	for python in $(PYTHONS); do run $$python $$default; done; \
	exit $$status

clean: ## remove what the other targets made
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
