"""Arrays that XLA is to make when they are needed, and not before."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from topoep_jax import _pallas
from topoep_jax._compat import platform_dependent, result_like, vary_like


def zeros_after(x: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros that are not made before `x` is there.

    Plain zeros of the same shape are one constant to XLA, or come out of one kernel, early, and all of them stay in
    memory from the first use to the last.
    """
    _, zero = lax.optimization_barrier((x, jnp.zeros((), dtype)))
    return vary_like(jnp.broadcast_to(zero, shape), x)


def empty_after(x: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """An array that holds anything, not made before `x` is there; zeros where there are no kernels for GPUs.

    Only for what is written before it is read. `lax.empty` depends on nothing, so that XLA makes it early, and it stays
    in memory for longer than zeros would; a kernel that writes nothing can wait.
    """
    _, zero = lax.optimization_barrier((x, jnp.zeros((1,), dtype)))

    def untouched(zero: jax.Array) -> jax.Array:
        kernel = lambda *_: None  # noqa: E731
        made: jax.Array = _pallas.call(kernel, (zero,), result_like(zero, shape), name="topoep_empty", programs=1)
        return made

    def filled(zero: jax.Array) -> jax.Array:
        return vary_like(jnp.broadcast_to(zero.reshape((1,) * len(shape)), shape), zero)

    return platform_dependent(vary_like(zero, x), cuda=untouched, default=filled)
