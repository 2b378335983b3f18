"""Arrays that XLA is to make when they are needed, and not before."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from topoep_jax._compat import vary_like


def zeros_after(x: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros that are not made before `x` is there.

    Plain zeros of the same shape are one constant to XLA, or come out of one kernel, early, and all of them stay in
    memory from the first use to the last.
    """
    _, zero = lax.optimization_barrier((x, jnp.zeros((), dtype)))
    return vary_like(jnp.broadcast_to(zero, shape), x)


def empty_like_rows(x: jax.Array, num_rows: int) -> jax.Array:
    """[num_rows, ...] of the dtype of x [n, ...], holding anything: memory that takes no time to make.

    Only for what is written before it is read. Platforms that have no such memory fill it with zeros.
    """
    return vary_like(lax.empty((num_rows, *x.shape[1:]), x.dtype), x)
