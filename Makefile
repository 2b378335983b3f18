# Each target sets up what it needs; everything lives in $(VENV).
#
#   make setup | train | experiments | experiments-full | quick | test | test-full | test-cuda | parity | lint | bench
#        | kernel-table | mutants | clean
#   VENV=.venv312       folder of the virtual environment
#   PYTHON=python3.12   what it is made from, where it does not exist yet (default: the first of 3.11, 3.12, 3.13 that works)
#   EXTRA=cuda13        also installs an extra of pyproject.toml: with cuda13 (or cuda12) training uses the GPUs
#   ARGS="--steps=300"  passed on by train, experiments, experiments-full, quick, test, test-full, test-cuda, parity, bench and mutants
#   WORKERS=2           processes among which test and test-cuda divide their tests; 1 to 3 GiB of memory each

PYTHON :=
VENV := .venv
ARGS :=
WORKERS := 2
EXTRA :=
PY := $(VENV)/bin/python
PARITY_VENV := .venv-parity
# A worker that runs out of tests takes some of another's; until then neighbours stay together, which share programs.
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal
# What a change breaks most, without a compiled layer: where things belong, configuration and messages, routers, and the
# laws of plans, of all planners on a published model and at random. Every small case and every combination of terms are
# left to `make test`.
QUICK := $(patsubst %,tests/%_test.py,house/structure topology config routing \
  plan/laws plan/cost plan/evaluate plan/pulls plan/vectors) -k "not (small_cases or every_combination or hot_owner or starts_no_devices)"
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-input
NATIVE_SRCS := $(shell find xla_ffi tests/native -type f -not -name "*.py*")
CC_FILES := $(shell find xla_ffi tests tools -name "*.cc" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh")

.PHONY: setup train experiments experiments-full quick test test-full test-cuda parity lint bench kernel-table mutants
.PHONY: clean
.DELETE_ON_ERROR:

setup: same-python $(VENV)/.native $(EXTRA:%=$(VENV)/.extra-%)

train: setup
	$(PY) -m train.pretrain $(ARGS)

# docs/experiments.md: a subset in minutes; everything in hours, which goes on where it stopped.
experiments: setup
	$(PY) -m train.experiments $(ARGS)

# The full set also compiles programs for GPUs, which takes a gigabyte of packages, but no GPU. Its summary is kept.
experiments-full: setup $(VENV)/.extra-cuda-aot
	$(PY) -m train.experiments --full --resume $(ARGS)
	$(if $(ARGS),,@mkdir -p results/full && cp runs/experiments-full/summary.json results/full/experiments.json)

# Under 30 seconds: for every few lines, where `make lint` and `make test` are for a commit.
quick: setup
	tools/lint_changed.sh $(VENV)/bin
	$(PYTEST) $(QUICK) $(ARGS)

# In another order every time: files, and tests within a file, which share programs. The first lines tell the seed, and
# ARGS=--random-order-seed=SEED repeats it.
test: setup
	$(PYTEST) --random-order $(ARGS)

test-full: setup
	@mkdir -p results/full
	$(PY) -m pytest -m full $(ARGS)

# The CUDA library and the GPU programs, compiled: no GPU is needed, and none is used.
test-cuda: setup $(VENV)/.extra-cuda-aot
	$(PYTEST) --require-cuda tests/aot tests/cuda tests/train/experiments/compiled_test.py $(ARGS)

# The models against transformers, which has an environment of its own: it needs torch, and no JAX.
parity: setup $(PARITY_VENV)/.requirements
	$(PY) -m pytest tests/models/parity_test.py --transformers-python=$(CURDIR)/$(PARITY_VENV)/bin/python $(ARGS)

lint: setup $(VENV)/.tidy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CC_FILES)
	$(VENV)/bin/shellcheck .ci/run .ci/bazel/run tools/*.sh

bench: setup
	@for bench in $(patsubst tests/bench/%.py,%,$(wildcard tests/bench/*.py)); do \
	  echo "== $$bench"; $(PY) -m tests.bench.$$bench $(ARGS) || exit 1; done

# docs/kernels.md
kernel-table: $(VENV)/.extra-cuda-aot
	@rm -rf build/cuda
	for arch in sm_90 sm_100; do $(PY) topoep_jax/_cuda_build.py --arch $$arch --out build/cuda/$$arch || exit 1; done
	$(PY) tools/kernel_table.py build/cuda/*

# results/full/mutants.json, order_mutants.json and model_mutants.json
mutants: setup $(VENV)/.extra-cuda-aot
	$(PY) tools/mutants.py $(ARGS)
	$(PY) tools/order_mutants.py
	$(PY) tools/model_mutants.py

clean:
	rm -rf $(VENV) $(PARITY_VENV) build dist bazel-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find topoep_jax models train tests examples -name __pycache__ -prune -exec rm -rf {} +

# pip is what `python -m venv` writes last: a folder without it is the rest of an interrupted run.
$(VENV)/bin/pip:
	@python=$$(tools/find_python.sh $(PYTHON)) && echo "== virtual environment $(VENV) from $$python" \
	  && $$python -m venv --clear $(VENV)

# The lists of requirements are pyproject.toml's own: "package", those of the package, and those of extras.
define REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
lists = {"package": project["dependencies"], **project["optional-dependencies"]}
print(*(requirement for name in sys.argv[1:] for requirement in lists[name]), sep="\n")
endef
export REQUIREMENTS

# An environment that is there keeps its Python: asking for another one must not go unheard.
.PHONY: same-python
same-python: | $(VENV)/bin/pip
	@test -z "$(PYTHON)" || test "$$($(PY) -c 'import sys; print(sys.version_info[:2])')" = \
	  "$$($(PYTHON) -c 'import sys; print(sys.version_info[:2])')" || { \
	  echo "$(VENV) is of $$($(PY) --version), not of PYTHON=$(PYTHON): add VENV=.venv312, or another folder"; exit 1; }

$(VENV)/.requirements: pyproject.toml | $(VENV)/bin/pip
	@echo "== Python packages"
	@$(PY) -c "$$REQUIREMENTS" package build test plan train > $@.txt
	@$(PIP) -r $@.txt
	@touch $@

$(VENV)/.extra-%: $(VENV)/.requirements
	@echo "== packages of the extra $*"
	@$(PY) -c "$$REQUIREMENTS" package $* > $@.txt
	@$(PIP) -r $@.txt
	@touch $@

$(PARITY_VENV)/.requirements: pyproject.toml | $(VENV)/bin/pip
	@echo "== torch and transformers, in $(PARITY_VENV)"
	@$(PY) -m venv $(PARITY_VENV)
	@$(PY) -c "$$REQUIREMENTS" parity > $@.txt
	@$(PARITY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -r $@.txt
	@touch $@

# clang-tidy on what the extensions are built of; it takes half a minute, and only what is native changes its answer.
$(VENV)/.tidy: .clang-tidy $(VENV)/.native
	@echo "== clang-tidy"
	@$(PY) -c "import json; print(*(entry['file'] for entry in json.load(open('$(VENV)/build/compile_commands.json'))))" \
	  | tr ' ' '\n' | xargs -P $(WORKERS) -n 1 $(VENV)/bin/clang-tidy --quiet -p $(VENV)/build --extra-arg=-Qunused-arguments
	@touch $@

$(VENV)/.native: $(VENV)/.requirements $(NATIVE_SRCS)
	@echo "== native extension"
	@$(PIP) --no-build-isolation --no-deps --config-settings=build-dir=$(VENV)/build \
	  --config-settings=cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON \
	  --config-settings=cmake.define.CMAKE_EXPORT_COMPILE_COMMANDS=ON \
	  --config-settings=cmake.define.TOPOEP_TEST_EXTENSION=ON --editable .
	@touch $@
