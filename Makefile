# Each target sets up what it needs; everything lives in $(VENV).
#
#   make setup | train | test | test-full | lint | bench | clean
#   VENV=.venv312       folder of the virtual environment
#   PYTHON=python3.12   what it is made from, where it does not exist yet (default: the first of 3.11, 3.12, 3.13 that works)
#   ARGS="--steps=300"  passed on by train, test, test-full and bench

PYTHON :=
VENV := .venv
ARGS :=
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-input
NATIVE_SRCS := $(shell find xla_ffi -type f)
CC_FILES := $(shell find xla_ffi tests/cc -name "*.cc" -o -name "*.h")

.PHONY: setup train test test-full lint bench clean
.DELETE_ON_ERROR:

setup: $(VENV)/.native

train: setup
	$(PY) -m train.pretrain $(ARGS)

test: setup
	$(PY) -m pytest $(ARGS)

test-full: setup
	@mkdir -p results/full
	$(PY) -m pytest -m full $(ARGS)

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CC_FILES)

bench: setup
	@for bench in $(patsubst tests/bench/%.py,%,$(wildcard tests/bench/*.py)); do \
	  echo "== $$bench"; $(PY) -m tests.bench.$$bench $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) build dist bazel-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find topoep_jax models train tests examples -name __pycache__ -prune -exec rm -rf {} +

# pip is what `python -m venv` writes last: a folder without it is the rest of an interrupted run.
$(VENV)/bin/pip:
	@python=$$(tools/find_python.sh $(PYTHON)) && echo "== virtual environment $(VENV) from $$python" \
	  && $$python -m venv --clear $(VENV)

# The list of requirements is pyproject.toml's own.
define REQUIREMENTS
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *extras["build"], *extras["test"], *extras["plan"], *extras["train"], sep="\n")
endef
export REQUIREMENTS

$(VENV)/.requirements: pyproject.toml | $(VENV)/bin/pip
	@echo "== Python packages"
	@$(PY) -c "$$REQUIREMENTS" > $@.txt
	@$(PIP) -r $@.txt
	@touch $@

$(VENV)/.native: $(VENV)/.requirements $(NATIVE_SRCS)
	@echo "== native extension"
	@$(PIP) --no-build-isolation --no-deps --config-settings=build-dir=$(VENV)/build \
	  --config-settings=cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON --editable .
	@touch $@
