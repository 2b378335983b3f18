#!/usr/bin/env bash
# Checks on one GPU what no CPU can tell; tools/gpu_check/__main__.py says what and how.
#
#   tools/gpu_check.sh [--budget-minutes 12] [--dry-run]
#   PYTHON=python3.12 tools/gpu_check.sh    names the interpreter, which needs JAX 0.12 and its CUDA 13 plugin
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -n ${PYTHON:-} ]]; then
  exec "$PYTHON" -m tools.gpu_check "$@"
fi
for python in python3 python3.12 .venv312/bin/python .venv/bin/python; do
  if "$python" -c "import sys, jax, numpy; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
    exec "$python" -m tools.gpu_check "$@"
  fi
done
echo "no Python 3.11 or newer with JAX: name one as PYTHON=..." >&2
exit 2
