# Every command of the project. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
KEY := $(shell cat pyproject.toml constraints.txt Makefile .ci/setup | cksum | tr -d ' ')
STAMP := .venv/.setup-$(KEY)
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup check format test test-fast demo up down status bench lock lock-gpu clean

help: ## List every command
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything pinned (PYTHON=... to choose the interpreter)

$(STAMP):
	@PYTHON="$(PYTHON)" bash .ci/setup $@

check: setup ## Format, lint, types, imports and tidiness, without changing anything
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports --no-logo
	$(PYTEST) -q --confcutdir tests/tidy tests/tidy

format: setup ## Format the code and mend what the linter can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

test: check ## All checks and all tests, on real Temporal, PostgreSQL and vLLM
	$(PYTEST)

test-fast: setup ## The tests that start no vLLM and take no long time
	$(PYTEST) -m "not vllm and not slow"

demo: setup ## Bring the stack up, run the examples' jobs to the end, show where time went
	$(BIN)/python -m examples.demo

up: setup ## Start the embedded stack and keep it running (Ctrl-C stops it)
	$(BIN)/muster up

down: setup ## Stop the embedded stack
	$(BIN)/muster down

status: setup ## Show the parts of the running stack
	$(BIN)/muster status

bench: setup ## Measure what a durable LLM step costs beyond the engine's own time
	$(BIN)/python -m bench.step_overhead

lock: setup ## Write constraints.txt from what .venv holds now
	.ci/lock cpu

lock-gpu: setup ## Write docker/constraints-gpu.txt by resolving the gpu extra
	.ci/lock gpu

clean: ## Remove .venv and every cache (not the data directory)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
