# Everything a newcomer needs: `make help`.
SHELL := /bin/bash
# The first Python from 3.11 to 3.13 that this machine has, under whatever name.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUANTIZED := $(VENV)/quantized
OLDEST := $(VENV)/oldest
NEWEST := $(VENV)/newest
export OMP_NUM_THREADS ?= 1
# Nothing here may look for the network once packages are installed.
export HF_HUB_OFFLINE := 1
export WANDB_MODE ?= offline
export TOKENIZERS_PARALLELISM := false
# Processes of tests import the same files: compiled by each, those take it up to three seconds of a processor.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-tables test-fast test-distributed test-random test-gpu-like test-oldest test-newest check wheel timeline golden models bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## make .venv with the pinned versions

# torch first and alone, so that TORCH can say which build: PyTorch's installation page names the index of those without CUDA.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { echo "needs Python 3.11 to 3.13; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## train on two processes as a pipeline, sample with both, show images and timeline
	$(BIN)/diffpipe train -cd examples/conf experiment=demo $(ARGS)

# For two cores: some tests of one process wait, and those of several half of the time, which do not run beside them.
test: setup  ## all tests but the rows of tables
	$(BIN)/python -m pytest -q --tb=short --durations=5 -n 3 --dist worksteal -m "not distributed and not table" $(ARGS)
	$(BIN)/python -m pytest -q --tb=short --durations=5 -n 4 --dist worksteal -m "distributed and not table" $(ARGS)

test-tables: setup $(QUANTIZED)/.installed  ## every row of docs/models.md (each denoiser and pipeline of diffusers), more ways to lose a rank, more combinations
	$(BIN)/python -m pytest -q --tb=short --durations=5 -n 2 --dist worksteal -m table $(ARGS)
	PYTHONPATH=$(QUANTIZED) $(BIN)/python -m pytest -q --tb=short tests/distributed/test_quantized.py \
		tests/distributed/test_optimizers.py tests/modules/test_optimizers.py

test-gpu-like: setup  ## tests of GPUs on some whose memory and arithmetic are the host's (tests/gpu_like; needs g++)
	$(BIN)/python -m tests.gpu_like -m pytest -q --tb=short -n 2 -m gpu tests/test_gpu.py $(ARGS)

# In a folder of their own: where they are installed, every process of diffusers and transformers imports them.
$(QUANTIZED)/.installed: constraints.txt | setup
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(QUANTIZED) -c constraints.txt \
		torchao bitsandbytes lion-pytorch prodigyopt schedulefree dadaptation
	@touch $@

test-fast: setup  ## the tests that take about a minute together
	$(BIN)/python -m pytest -q --tb=short -n 2 --dist worksteal -m "not slow and not distributed and not table" $(ARGS)

test-distributed: setup  ## the tests that start several processes
	$(BIN)/python -m pytest -q --tb=short -n 4 --dist worksteal -m distributed $(ARGS)

test-random: setup  ## laws (hypothesis) with thousands of new examples, which `make test` draws alike each time
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -q -m hypothesis tests $(ARGS)

# What imports Lightning, diffusers or transformers, and some of it on several ranks.
test-oldest: $(OLDEST)/.installed  ## a thousand tests with the lowest versions that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest -q --tb=short -n 2 --dist worksteal -m "not slow and not distributed and not table" \
		tests/callbacks tests/modules tests/predictor tests/training $(ARGS)
	$(OLDEST)/bin/python -m pytest -q --tb=short -n 2 --dist worksteal -m "not slow and not table" \
		tests/distributed/test_checkpoints.py tests/distributed/test_parity.py $(ARGS)

$(OLDEST)/.installed: pyproject.toml | setup
	$(PYTHON) -m venv --clear $(OLDEST)
	sed -nE 's/^( |lora = \[)+"([a-z-]+)>=([0-9.]+).*/\2==\3/p' pyproject.toml > $(OLDEST)/lowest.txt
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c $(OLDEST)/lowest.txt \
		-e '.[lora,webdataset,video]' pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

# torch comes with gigabytes of CUDA.
test-newest: $(NEWEST)/.installed  ## the fast tests with the newest versions that pyproject.toml allows
	$(NEWEST)/bin/python -m pytest -q --tb=short -n 2 --dist worksteal -m "not slow and not distributed and not table" $(ARGS)

$(NEWEST)/.installed: pyproject.toml | setup
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

check: setup  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

wheel: setup  ## build the wheel into dist/
	$(BIN)/python -m build --wheel --outdir dist .

SCHEDULE ?= 1f1b
STAGES ?= 4
MICROBATCHES ?= 8
timeline: setup  ## print a schedule: SCHEDULE=1f1b STAGES=4 MICROBATCHES=8
	@$(BIN)/python -m lightning_diffpipe.viewing.text $(SCHEDULE) $(STAGES) $(MICROBATCHES)

golden: setup  ## rewrite the golden timelines; the diff is the review
	$(BIN)/python -m pytest -q tests/planning --update-golden

models: setup  ## rewrite docs/models.md from the equivalence test
	$(BIN)/python -m tests.zoo.write_table

bench: setup  ## run every benchmark; needs an otherwise idle machine
	for main in benchmarks/*/main.py; do $(BIN)/python $$main || exit 1; done

clean:  ## remove what make made
	rm -rf $(VENV) build dist outputs *.egg-info .ruff_cache .mypy_cache .pytest_cache
