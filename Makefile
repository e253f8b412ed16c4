# Every target makes its own .venv. On a machine with a GPU: make train TORCH=torch
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/first
TRAIN_ARGS ?=

.PHONY: train test check bench clean

$(VENV)/python.stamp:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	touch $@

$(VENV)/train.stamp: $(VENV)/python.stamp pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[train]"
	touch $@

$(VENV)/dev.stamp: $(VENV)/train.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[train,dev]"
	touch $@

train: $(VENV)/train.stamp
	$(BIN)/adafrugal train --out $(RUN) --budget.seconds 120 $(TRAIN_ARGS)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/distributed
	$(BIN)/python -m pytest tests/distributed

check: $(VENV)/dev.stamp
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/house

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/optimizer_memory.py
	$(BIN)/python benchmarks/optimizer_step.py --rounds 10

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
