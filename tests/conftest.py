"""One process, 32 emulated CPU devices, a strict world: what every test file relies on.

Tests take submeshes of 1, 2, 8 or 32 devices. The environment is set before JAX is imported, since it reads it once.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=32".strip()

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No compilation cache, though compiling is most of the time: on CPU a program with collectives that JAX's persistent
# cache returns may run two of them at once and deadlock (jax 0.10.2: the default training step, at its second call).
jax.config.update("jax_enable_compilation_cache", False)

# The same examples on every run and machine; a slow machine is no failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
