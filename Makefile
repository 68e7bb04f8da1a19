# Every target makes or updates .venv first (scripts/setup_env.py); a second call takes no time.
PYTHON ?= python3
VENV ?= .venv
SETUP = $(PYTHON) scripts/setup_env.py --venv $(VENV)
# Several peers share this machine's cores: one thread each is faster than all fighting for all.
# Swarm tests wait for their peers most of the time: two more than there are cores. They come first: the last ones are then
# short, and no worker waits for another; and they are given out one by one, not in piles.
WORKERS ?= 4
SEEDS ?= 0:10000
# (And where Python may not keep what it has compiled, each of a thousand processes compiles this package anew.)
THREADS = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
CODE = $(wildcard src tests examples benchmarks scripts docs)

.DEFAULT_GOAL := help
.PHONY: help demo test test-full hostile gpu-check check bench docs build format clean

help: ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 picks the interpreter (3.10 to 3.13) that .venv is made with"

demo: ## three peers on this machine train a small GPT; about five minutes
	@$(SETUP) demo
	$(THREADS) $(VENV)/bin/python examples/demo.py $(ARGS)

test: ## swarm tests with real processes, then unit tests; ARGS="-k name" is handed to pytest
	@$(SETUP) test
	$(THREADS) $(VENV)/bin/python -m pytest -q -n $(WORKERS) --maxschedchunk=1 tests/swarm tests/unit $(ARGS)

test-full: ## all swarm tests on both engines, and the unit tests
	$(MAKE) test ENGINES=native,hivemind

hostile: ## random faults, lies and broken frames, SEEDS=first:last of each; 10,000 take about an hour
	@$(SETUP) test
	SEEDS=$(SEEDS) $(THREADS) $(VENV)/bin/python -m pytest -q -n $(WORKERS) tests/unit/protocol/test_hostile.py \
		tests/unit/protocol/test_every_message.py tests/unit/protocol/test_liar.py \
		tests/unit/protocol/test_state_machine.py tests/unit/protocol/test_waiting.py tests/unit/native/test_fuzz.py $(ARGS)

gpu-check: ## what needs a GPU, by PYTHON=/path/to/python with torch for CUDA; without one: what remains unmeasured
	$(THREADS) $(PYTHON) scripts/gpu_check.py $(ARGS)

check: ## ruff and mypy
	@$(SETUP) test dev
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/mypy

format: ## let ruff rewrite what it can
	@$(SETUP) test dev
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

bench: ## a measured table of the README, and every bar with what was found last; a bar that is missed is an error
	@$(SETUP) test
	PYTHONPATH=tests $(THREADS) $(VENV)/bin/python benchmarks/run.py $(ARGS)
	$(VENV)/bin/python benchmarks/bars.py

docs: ## HTML in docs/_build/html; a warning is an error
	@$(SETUP) docs
	$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

build: ## sdist and wheel in dist/, installed into a throwaway environment and imported there
	@$(SETUP) dev
	$(VENV)/bin/python scripts/check_dist.py

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist demo-output benchmarks/out docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +
