#!/usr/bin/env bash
# Prints a Python >= 3.11 that can make a virtual environment and build an extension, and makes sure of a C++ compiler.
# Arguments: the interpreters to try, in this order. On Debian and Ubuntu, root installs what is missing; others are told how.
set -euo pipefail

packages="g++ python3 python3-dev python3-venv"
(($#)) || set -- python3.11 python3.12 python3.13 python3

# An interpreter counts only if it runs: the shims of version managers print a name that may not.
usable() {
  "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, os, sys, sysconfig, venv
sys.exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
PY
}

found() {
  command -v g++ >/dev/null || command -v clang++ >/dev/null || [[ -n ${CXX:-} ]] || return 1
  for python in "$@"; do
    if usable "$python"; then
      command -v "$python"
      return
    fi
  done
  return 1
}

if found "$@"; then
  exit
fi
if [[ $EUID == 0 ]] && command -v apt-get >/dev/null; then
  echo "installing $packages" >&2
  apt-get update -qq >&2
  # shellcheck disable=SC2086  # a list of packages
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >&2
  if found "$@"; then
    exit
  fi
fi
cat >&2 <<EOF
Needed: a C++17 compiler and a Python of at least 3.11 with venv and its headers (tried: $*).
On Debian 12 or Ubuntu 24.04:  sudo apt-get install -y $packages
With another interpreter:      make setup PYTHON=/path/to/python3.12
EOF
exit 1
