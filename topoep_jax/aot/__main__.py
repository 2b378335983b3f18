"""`python -m topoep_jax.aot` compiles a layer or a step for GPUs, on any machine, and says what it needs."""

import sys

from topoep_jax.aot import command
from topoep_jax.cli import execute

MEANING = "compile a layer, or a step of yours, for GPUs that need not be there, and say what it needs and does"

if __name__ == "__main__":
    sys.exit(execute("python -m topoep_jax.aot", MEANING, lambda: command, sys.argv[1:]))
