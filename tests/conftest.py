"""One process, 32 emulated CPU devices, a strict world: what every test file relies on.

Tests take submeshes of 1, 2, 8 or 32 devices. The environment is set before JAX is imported, since it reads it once.
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=32".strip()

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling is most of the time: a virtual environment keeps its programs for the next run, `make clean` drops them.
if sys.prefix != sys.base_prefix:
    jax.config.update("jax_compilation_cache_dir", str(Path(sys.prefix) / "jax_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# The same examples on every run and machine; a slow machine is no failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
