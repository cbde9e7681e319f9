# Every target works from a fresh checkout: the ones that need it first create .venv.
#
#   make test PYTHON=python3.12    another interpreter (3.11 or newer)
#   make test JOBS=8               more test processes
#   make spills TRITON=3.8.0       the Hopper kernels with that Triton; make test takes a few of them
#
# On Linux, PyPI's torch comes with the CUDA libraries (gigabytes). For the small CPU build:
#
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
JOBS ?= 2
TRITON ?= 3.6.0
# of tests/kernels/test_compile.py
FORMS ?= spill
# beside that of .venv, make test compiles a few forms near the limit of registers with these
OTHERS ?= 3.6.0 3.8.0 3.9.0

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OTHER := build/triton-$(TRITON)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# worksteal, not loadfile: a few heavily parametrized files hold most of the time, and a file
# bound to one worker would leave the others idle. One thread per worker: they share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint spills docs bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## check attention, then train with and without QK-Clip (a few minutes)
	@$(BIN)/keel demo

test: lint ## lint, then all tests (GPU tests are skipped where there is no GPU), and some of `spills`
	@echo "[keel] tests"
	@$(PYTEST) tests --ignore=tests/kernels
	@echo "[keel] kernel tests in the Triton interpreter"
	@TRITON_INTERPRET=1 $(PYTEST) tests/kernels -k "not near_the_limit"
	@for version in $(OTHERS); do \
		if $(MAKE) --no-print-directory build/triton-$$version/.installed TRITON=$$version; \
			then $(MAKE) --no-print-directory spills TRITON=$$version FORMS=near_the_limit || exit 1; \
			else echo "[keel] Triton $$version cannot be installed here: nothing compiled with it"; fi; \
		done

lint: $(STAMP) ## check style, types and layers
	@echo "[keel] ruff check"
	@$(BIN)/ruff check .
	@echo "[keel] ruff format"
	@$(BIN)/ruff format --check .
	@echo "[keel] mypy"
	@$(BIN)/mypy
	@echo "[keel] import layers"
	@$(BIN)/lint-imports

spills: $(STAMP) $(OTHER) ## compile the Hopper kernels with another Triton, and look for spills
	@echo "[keel] Hopper kernels compiled with Triton $(TRITON)"
	@PYTHONPATH=build/triton-$(TRITON) $(PYTEST) tests/kernels/test_compile.py -k "$(FORMS)"

docs: $(STAMP) ## build the documentation; a warning is an error
	@$(BIN)/python -m sphinx -b html -W --keep-going -n -q -d build/doctrees docs build/docs
	@echo "[keel] build/docs/index.html"

bench: $(STAMP) ## small benchmarks beside the libraries that are here (minutes); keel bench runs all
	@$(BIN)/keel bench --quick

clean: ## remove .venv, caches, build output and the demo's runs
	@echo "[keel] removing $(VENV), caches, build output and the demo's runs"
	@rm -rf $(VENV) build dist benchmarks/out runs/bench runs/demo .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(OTHER): | $(STAMP)
	@echo "[keel] installing Triton $(TRITON) beside that of $(VENV)"
	@$(PIP) install --no-deps --upgrade --target build/triton-$(TRITON) triton==$(TRITON)
	@touch $@

# torch goes first and alone, so that a CPU build at hand is taken and then kept. PIP_CONSTRAINT
# (older pip) and PIP_BUILD_CONSTRAINT (newer pip) hold the pins in the isolated build as well.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "[keel] $(PYTHON) is missing or older than 3.11; try make PYTHON=python3.11" >&2; exit 1; }
	@echo "[keel] creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[keel] installing torch (the longest step)"
	@$(PIP) install -c constraints.txt torch
	@echo "[keel] installing keel and its development tools"
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(PIP) install -c constraints.txt -e '.[dev,triton]'
	@touch $@
	@echo "[keel] $(VENV) is ready: $$($(BIN)/python -c 'import torch; print("torch", torch.__version__)')"
