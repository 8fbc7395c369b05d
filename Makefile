# Every target but gpu needs only Python 3.11+ and makes the environment it runs in.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SEED   ?= 1

.PHONY: demo test check lint docs figures parity torture gpu bundled clean

demo: $(VENV)/.ready            ## show how much memory helps, then train a small model; under three minutes
	$(BIN)/longspan demo

test: $(VENV)/.ready            ## all tests but those marked gpu or torture
	$(BIN)/pytest -rs -n 3 --dist loadfile --no-loadscope-reorder -m "not gpu and not torture"

check: lint                     ## the gate: lint and the fast tests
	$(BIN)/pytest -n 2 -m "not gpu and not torture and not slow"

lint: $(VENV)/.ready            ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs-ready       ## the documentation as a site in build/docs; a broken internal link is an error
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

figures: $(VENV)/.ready         ## the figures of the README; needs `longspan data get english-novels --from FILE`
	$(BIN)/longspan figures --memories 16,32,64,128,256,512,1024,2048,4096 --data english-novels --split test \
	    --tokens 20000 --out docs/images
	$(BIN)/python -m longspan.experiments.figures.architecture docs/images

parity: .venv-parity/.ready     ## compares tests/parity with fixtures made again from `transformers`
	.venv-parity/bin/python tests/parity/compare.py

torture: $(VENV)/.ready         ## the reliability tests at full size; SEED=7 kills at other times
	LONGSPAN_TORTURE=1 LONGSPAN_SEED=$(SEED) $(BIN)/pytest -n 2 -m "not gpu" tests/checkpoints tests/data tests/tokenizers tests/training \
	    tests/cli tests/contract tests/scoring tests/decoding tests/interop tests/serving tests/kernels tests/bundled tests/experiments

gpu:                            ## the tests that need CUDA, in the current environment
	$(PYTHON) -m pytest -m gpu

bundled: $(VENV)/.ready         ## RUN=folder: makes the bundled model, its card, samples and pinned figures from a training run
	$(BIN)/python benchmarks/make_bundled_model.py $(RUN)
	$(BIN)/python benchmarks/pin_bundled_model.py
	$(BIN)/python benchmarks/names.py

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt \
	    --editable ".[dev,plots,zstd,arrow,serve,write,brotli,hf,onnx,metrics]"
	touch $@

$(VENV)/.docs-ready: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[docs]"
	touch $@

.venv-parity/.ready: tests/parity/requirements.txt
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/pip install --quiet torch==2.13.0
	.venv-parity/bin/pip install --quiet --requirement tests/parity/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-parity build dist
