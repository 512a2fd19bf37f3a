# Two commands on a machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard jaxllm/ops/native/csrc/*.* jaxllm/ops/native/csrc/*/*)
# Files are compiled when they are imported, not all at once.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable

.PHONY: demo test test-full soak lint format clean

demo: $(VENV)/.installed
	$(BIN)/jaxllm generate --model demo:llama --prompt "Once upon a time" --echo --temperature 0.8 --seed 1

# Most of the time is compiling: the tests of every day do without LLVM's expensive passes.
test: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
test: lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not full"

test-full: $(VENV)/.installed-full
	$(BIN)/pytest -m full --timeout 3600 -s

soak: $(VENV)/.installed
	$(BIN)/python scripts/soak.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("jaxllm needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about a minute, and two for the tests"

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(INSTALL) .
	@touch $@

$(VENV)/.installed-test: $(VENV)/bin/python $(SOURCES)
	$(INSTALL) '.[test]'
	@touch $@ $(VENV)/.installed

# With lm-evaluation-harness, whose many dependencies the tests of every day do without.
$(VENV)/.installed-full: $(VENV)/.installed-test
	$(INSTALL) '.[test,eval]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
