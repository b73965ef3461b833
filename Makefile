# One-word entry points. `make run` and `make test` work from a fresh clone; both install the same way.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q
INPUTS := pyproject.toml constraints.txt scripts/install.py

.PHONY: help run test check check-fast types bench bench-host bench-peers bench-detokenizer numerics long-walk drills drills-short schema-suite clean protos venv kernels-report kernels-36
.DEFAULT_GOAL := help

help:
	@echo 'make run         serve the demo model on 127.0.0.1:8000 (ARGS="--port 8100" for another port)'
	@echo 'make test        all checks and tests'
	@echo 'make check       format, lint, types, architecture, protos'
	@echo 'make check-fast  format, lint, architecture'
	@echo 'make bench-host  host cost of the engine without a model (`nori bench` measures the whole)'
	@echo 'make bench-peers  our server and others under the same load, in turn (see bench/peers.yaml)'
	@echo 'make numerics    batch-invariant mode on the demo model: bits, cost, near ties without it (10 minutes)'
	@echo 'make bench-detokenizer  microseconds per token from ids to text, with and without stop strings'
	@echo 'make long-walk   a million steps of the engine'"'"'s random walk'
	@echo 'make schema-suite  JSON schemas of public suites against the masks (ARGS="--suite FOLDER")'
	@echo 'make drills      processes killed, lines cut, queues flooded under load (25 minutes; docs/drills.md); make drills-short: nine of them'
	@echo 'make kernels-report  kernels compiled for every target without a GPU: registers, spills, shared memory'
	@echo 'make kernels-36  the kernel tests and the report under Triton 3.6, as GPU images have it'
	@echo 'make protos      compile protos/ into nori_cluster/rpc/generated'
	@echo 'make clean       remove caches and build outputs (the environment stays: rm -rf $(VENV))'

# Stamps: a second run installs nothing unless the dependencies changed. The dev install contains the plain one.
$(VENV)/installed: $(INPUTS)
	@$(PYTHON) scripts/install.py $(VENV)
	@touch $@

$(VENV)/installed-dev: $(INPUTS)
	@$(PYTHON) scripts/install.py $(VENV) dev
	@touch $(VENV)/installed $@

venv: $(VENV)/installed-dev

run: $(VENV)/installed
	@exec $(BIN)/nori demo $(ARGS)

# Cheapest first; the first group that fails ends the run.
test: check
	$(PYTEST) -m unit
	$(PYTEST) -m contract
	$(PYTEST) -m e2e
	PYTHONPATH=tests $(BIN)/python -m drills.run --short

check: check-fast types
	$(BIN)/buf lint protos
	$(BIN)/python scripts/gen_protos.py --check

types: $(VENV)/installed-dev
	$(BIN)/mypy

check-fast: $(VENV)/installed-dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(PYTEST) tests/test_architecture.py

bench: bench-host

# Other servers and ours in turn: bench/peers.yaml says which. ARGS="--rounds 1 --concurrency 1" for a quick look.
bench-peers: $(VENV)/installed
	$(BIN)/nori bench peers $(ARGS)

bench-host: $(VENV)/installed-dev
	$(BIN)/python scripts/bench_host.py $(ARGS)

numerics: $(VENV)/installed-dev
	PYTHONPATH=tests $(BIN)/python scripts/numerics.py $(ARGS)

bench-detokenizer: $(VENV)/installed-dev
	$(BIN)/python scripts/bench_detokenizer.py $(ARGS)

long-walk: $(VENV)/installed-dev
	PYTHONPATH=tests $(BIN)/python -m engine.long_walk $(ARGS)

schema-suite: $(VENV)/installed-dev
	$(BIN)/python scripts/schema_suite.py $(ARGS)

kernels-report: $(VENV)/installed-dev
	TRITON_INTERPRET=0 $(BIN)/python -m nori_kernels.report $(ARGS)

# Triton 3.6 in a folder that stands before the environment's; its interpreter needs numpy below 2.4. torch stays as it is.
TRITON36 := build/triton-3.6
$(TRITON36)/installed: Makefile | $(VENV)/installed-dev
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(TRITON36) 'triton==3.6.0' 'numpy<2.4'
	@touch $@

kernels-36: $(TRITON36)/installed
	PYTHONPATH=$(TRITON36) TRITON_INTERPRET=1 $(PYTEST) -W 'ignore:Conversion of an array:DeprecationWarning' tests/kernels $(ARGS)
	PYTHONPATH=$(TRITON36) TRITON_INTERPRET=0 $(BIN)/python -m nori_kernels.report

# ARGS="--only NAME,NAME --repeat N --seed N" for some of them, ARGS=--list for their names.
drills: $(VENV)/installed-dev
	PYTHONPATH=tests $(BIN)/python -m drills.run $(ARGS)

# 6 kills, 1 stop, 1 router, 1 drain: under two minutes.
drills-short: $(VENV)/installed-dev
	PYTHONPATH=tests $(BIN)/python -m drills.run --short $(ARGS)

protos: $(VENV)/installed-dev
	$(BIN)/python scripts/gen_protos.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .hypothesis .pytest_cache
	find nori_cluster tests scripts kernels -name __pycache__ -type d -prune -exec rm -rf {} +
