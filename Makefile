# On a machine with Python 3.11+ and nothing else, every target makes the environment it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SEED   ?= 1

.PHONY: demo test check lint parity torture gpu box clean

demo: $(VENV)/.ready            ## trains, scores and reads a model in under five minutes
	$(BIN)/longspan demo

test: $(VENV)/.ready            ## the whole suite
	$(BIN)/pytest -n 2 -m "not gpu and not torture"

check: lint                     ## the gate: ruff, mypy, import-linter, the fast tests
	$(BIN)/pytest -n 2 -m "not gpu and not torture and not slow"

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

parity: .venv-parity/.ready     ## the fixtures of tests/parity made again from `transformers` and compared
	.venv-parity/bin/python tests/parity/compare.py

torture: $(VENV)/.ready         ## the reliability tests at full size; SEED=7 kills at other instants
	LONGSPAN_TORTURE=1 LONGSPAN_SEED=$(SEED) $(BIN)/pytest -n 2 -m "not gpu" tests/checkpoints tests/data tests/tokens tests/training tests/cli \
	    tests/contract tests/evaluation tests/generation

gpu:                            ## what needs CUDA, in the environment at hand
	$(PYTHON) -m pytest -m gpu

box: $(VENV)/.ready             ## RUN=folder: the model in the box from a training run, scored, with its card
	$(BIN)/python benchmarks/make_box.py $(RUN)

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,plots]"
	touch $@

.venv-parity/.ready: tests/parity/requirements.txt
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/pip install --quiet torch==2.13.0
	.venv-parity/bin/pip install --quiet --requirement tests/parity/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-parity build dist
