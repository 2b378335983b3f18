#!/usr/bin/env bash
# Checks the device transport among the GPUs of one node or several; tools/cluster_check/__main__.py says what and how.
#
#   tools/cluster_check.sh                                                            8 GPUs of one node
#   srun --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 tools/cluster_check.sh --folder SHARED     4 x 8
#   tools/cluster_check.sh --nodes 4 --node I --coordinator HOST:PORT --folder SHARED               without Slurm
#   tools/cluster_check.sh --dry-run                                                  on CPUs
#   PYTHON=...                                                                        names the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -n ${PYTHON:-} ]]; then
  exec "$PYTHON" -m tools.cluster_check "$@"
fi
for python in python3 python3.12 .venv312/bin/python .venv/bin/python; do
  if "$python" -c "import sys, topoep_jax; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
    exec "$python" -m tools.cluster_check "$@"
  fi
done
echo "no Python 3.11 or newer with topoep_jax: install it, and name the interpreter as PYTHON=..." >&2
exit 2
