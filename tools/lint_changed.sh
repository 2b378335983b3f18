#!/usr/bin/env bash
# Checks the style of what differs from the branch that this one follows, or else from HEAD: seconds, where `make lint`
# reads everything and runs mypy. Usage: tools/lint_changed.sh BIN, the folder of ruff and clang-format.
set -euo pipefail
cd "$(dirname "$0")/.."

base=$(git merge-base HEAD '@{upstream}' 2>/dev/null) || base=HEAD
mapfile -t python < <(git diff --name-only --diff-filter=d "$base" -- '*.py'; git ls-files --others --exclude-standard '*.py')
sources=('*.cc' '*.h' '*.cu' '*.cuh')
mapfile -t native < <(
  git diff --name-only --diff-filter=d "$base" -- "${sources[@]}"
  git ls-files --others --exclude-standard "${sources[@]}"
)
echo "== ${#python[@]} Python files and ${#native[@]} of C++ and CUDA that differ from $(git rev-parse --short "$base")"
if ((${#python[@]})); then
  "$1/ruff" check "${python[@]}"
  "$1/ruff" format --check "${python[@]}"
fi
if ((${#native[@]})); then
  "$1/clang-format" --dry-run -Werror "${native[@]}"
fi
