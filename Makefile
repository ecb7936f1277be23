# Two commands to start with: `make demo` and `make test`. Each makes .venv on its first run.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# Installed before everything else: the tested release, and not whatever torch the newest resolver would pick.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ntp-env
# Seconds after which a hanging suite is ended instead of holding the machine.
TEST_LIMIT ?= 1500
CHAOS_MINUTES ?= 30

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help env check test test-full demo bench bench-load bench-recovery bench-goodput goodput chaos gpu-acceptance

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

env: $(STAMP) ## make .venv with the tested set of packages

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install one, or say make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,nvml,titan]'
	touch $@

check: $(STAMP) ## lint, types, layers
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

test: $(STAMP) ## the tests, without the long sweeps
	timeout -k 10 $(TEST_LIMIT) $(BIN)/python -m pytest -m "not full"

test-full: $(STAMP) ## all tests, with the long sweeps
	$(BIN)/python -m pytest

demo: $(STAMP) ## fine-tune a llama on replicas of degree 3 and 2; then one of six workers is lost, and comes back
	$(BIN)/python examples/finetune_hf.py --replica-sizes 3 2 --accelerator cpu --steps 20 --block-size 64
	$(BIN)/python examples/lose_a_gpu.py --undisturbed --epochs 3
	$(BIN)/python examples/lose_a_gpu.py --epochs 3

bench: $(STAMP) ## step time and memory beside Lightning's own ModelParallelStrategy
	$(BIN)/python benchmarks/bench_step.py

bench-recovery: $(STAMP) ## kill one of six workers: seconds to the next step, live and by restart from a checkpoint
	$(BIN)/python -m benchmarks.bench_recovery

chaos: $(STAMP) ## half an hour of random faults over random topologies, each held against one process; looks for leaks
	$(BIN)/python -m benchmarks.chaos --minutes $(CHAOS_MINUTES)

bench-goodput: $(STAMP) ## time inside the goodput ledger and its callback, over 10,000 steps
	$(BIN)/python -m benchmarks.bench_goodput

goodput: $(STAMP) ## the same failures under four policies: goodput, tokens, lost steps, end loss, and what the simulator says
	$(BIN)/python -m benchmarks.bench_policies

bench-load: $(STAMP) ## host memory of each worker while it reads its part of a 1 GB model
	$(BIN)/python -m benchmarks.bench_load

gpu-acceptance: $(STAMP) ## for owners of a GPU box: parity, bf16, step time, memory; writes one JSON
	$(BIN)/python -m benchmarks.gpu_acceptance
